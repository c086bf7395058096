# pyright: basic
"""What the backend does where it is not root, or where the kernel grants no namespaces."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
