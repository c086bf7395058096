# pyright: basic
"""A sandbox backend, and a small Harbor task whose tests trust nothing that the agent wrote."""

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from etude.environments.local import LocalBackend
from etude.types import Task

BROKEN = "def add(a, b):\n    return a - b\n"
REPAIRED = "def add(a, b):\n    return a + b\n"
TEST_SH = "#!/bin/sh\nexec python3 -I -S /tests/run.py\n"
RUN_PY = """
import json, subprocess, sys
CASES = [([2, 3], 5), ([1, 1], 2)]
CHILD = '''
import json, sys
sys.path.insert(0, ".")
answers, sys.stdout = sys.stdout, sys.stderr
from solution import add
for arguments in json.load(sys.stdin):
    print(json.dumps(add(*arguments)), file=answers, flush=True)
'''
child = subprocess.run(
    [sys.executable, "-I", "-S", "-B", "-c", CHILD], input=json.dumps([arguments for arguments, _ in CASES]).encode(),
    stdout=subprocess.PIPE, user="agent", group="agent", extra_groups=[], cwd="/app", timeout=10,
)
right = child.stdout.decode(errors="replace").split() == [str(expected) for _, expected in CASES]
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": float(right)}, file)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[LocalBackend]:
    started = await LocalBackend.start()
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolated(backend: LocalBackend) -> LocalBackend:
    """A backend in which the tests and the code under test are two users."""
    if not backend.capabilities.user_isolated:
        pytest.skip("; ".join(backend.limitations))
    return backend


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    def make(
        tests: dict[str, str] | None = None, *, app: dict[str, str] | None = None, name: str = "task", **fields: object
    ) -> Task:
        directory = tmp_path / name
        texts = {
            "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY app/ /app/\n",
            **{f"environment/app/{path}": text for path, text in {"solution.py": BROKEN, **(app or {})}.items()},
            **{f"tests/{path}": text for path, text in (tests or {"test.sh": TEST_SH, "run.py": RUN_PY}).items()},
        }
        for path, text in texts.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        digest = hashlib.sha256(str(directory).encode()).hexdigest()
        return Task(task_id=name, path=str(directory), digest=digest, instruction="", **fields)  # type: ignore[arg-type]

    return make
