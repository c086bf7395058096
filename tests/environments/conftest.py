# pyright: basic
"""A backend per module, and small Harbor task directories."""

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from etude.environments.local import LocalBackend
from etude.types import Task

DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\nCOPY app/ /app/\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[LocalBackend]:
    started = await LocalBackend.start()
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def contained(backend: LocalBackend) -> LocalBackend:
    """A backend whose sandboxes have namespaces of their own."""
    if not backend.capabilities.process_isolated:
        pytest.skip("; ".join(backend.limitations))
    return backend


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    def make(
        files: dict[str, str] | None = None, *, dockerfile: str = DOCKERFILE, name: str = "task", **fields: object
    ) -> Task:
        directory = tmp_path / name
        (directory / "environment" / "app").mkdir(parents=True)
        (directory / "environment" / "Dockerfile").write_text(dockerfile)
        for path, text in (files or {"solution.py": "x = 1\n"}).items():
            file = directory / "environment" / "app" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        digest = hashlib.sha256(str(directory).encode()).hexdigest()
        return Task(task_id=name, path=str(directory), digest=digest, instruction="", **fields)  # type: ignore[arg-type]

    return make
