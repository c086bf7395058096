# pyright: basic
"""What the backend does where it is not root, or where the kernel grants no namespaces."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from etude.environments.local import LocalBackend

UNPRIVILEGED = """
import asyncio, os, sys
from etude.environments.local import LocalBackend
from etude.types import Task

async def main():
    backend = await LocalBackend.start()
    task = Task(task_id="t", path=sys.argv[1], digest="d", instruction="")
    async with backend.create(task, model_port=9) as environment:
        await environment.upload({"/app/new": b"n"})
        result = await environment.execute(["sh", "-c", "cat solution.py new; rm solution.py; echo $$"], timeout_s=9)
        changes = await environment.changes(max_bytes=100)
    await backend.close()
    print(os.geteuid(), backend.capabilities.process_isolated, backend.capabilities.user_isolated)
    print(backend.limitations, result, changes, file=sys.stderr)
    assert result.stdout.startswith(b"x = 1\\nn"), result
    assert changes == {"solution.py": None, "new": b"n"}, changes

asyncio.run(main())
"""


def test_a_backend_works_for_a_user_without_privileges(make_task):
    nobody = 65534
    if os.geteuid() != 0:
        pytest.skip("the other tests run without privileges already")
    python = "/usr/bin/python3"
    env = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    options = {"user": nobody, "group": nobody, "extra_groups": [], "env": env, "capture_output": True, "text": True}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        task = shutil.copytree(make_task().path, f"{directory}/task")
        if subprocess.run([python, "-c", "import etude, msgspec"], check=False, **options).returncode:
            pytest.skip("no interpreter that an unprivileged user may run has this project's dependencies")
        done = subprocess.run([python, "-c", UNPRIVILEGED, task], check=False, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(nobody)
    assert done.stdout.split()[2] == "False"


def working_in(root):
    """Names of the processes whose working directory is below `root`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(root):
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue
    return found


async def test_without_namespaces_it_declares_what_is_not_enforced_and_still_cleans_up(make_task, tmp_path):
    harness = tmp_path / "harness"
    harness.mkdir()
    (harness / "mini.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])\n")
    backend = await LocalBackend.start(mounts={"/opt/harness": harness}, namespaces=False)
    try:
        capabilities = backend.capabilities
        assert not capabilities.process_isolated
        assert not capabilities.network_isolated
        assert not capabilities.filesystem_isolated
        assert backend.limitations[0] == "no namespaces: not asked for"
        async with backend.create(make_task({"a.py": "1", "b.py": "2"}), model_port=4321) as environment:
            assert environment.model_url == "http://127.0.0.1:4321/v1"
            ran = await environment.execute(["python3", "-I", "/opt/harness/mini.py", "/app/a.py", "x"], timeout_s=10)
            root, _, arguments = ran.stdout.decode().partition("/app ")
            assert arguments.strip() == str([f"{root}/app/a.py", "x"])
            script = (
                "echo 1 > new; rm b.py; (setsid nohup sleep 1000 >/dev/null 2>&1 &); setsid sleep 1000 & sleep 1000"
            )
            cut = await environment.execute(["sh", "-c", script], timeout_s=0.5)
            assert cut.timed_out
            assert await environment.changes(max_bytes=100) == {"new": b"1\n", "b.py": None}
            assert not [name for name in working_in(root) if "sleep" in name]
            assert working_in("/")
    finally:
        await backend.close()
    assert not os.path.exists(root)  # noqa: ASYNC240, PTH110
