"""Grading as Harbor does it: in a fresh sandbox, with tests that the agent has never met.

Nothing that an agent or a task left is worked on in the event loop: tests run in the sandbox, files are read and
screened in threads.
"""

import asyncio
import os
import signal
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from etude.errors import SandboxError, TaskError
from etude.interfaces import Environment, EnvironmentBackend, ExecResult, Grade
from etude.rewards.protection import Sorted, sort_change
from etude.rewards.screens import SCREENS, Screen
from etude.rewards.verdict import MAX_REWARD_BYTES, read_verdict
from etude.types import Task

_TESTS = "/tests"
_RESULTS = "/logs/verifier"
_MAX_TEST_FILES = 10_000
_MAX_TEST_BYTES = 256 << 20
_MAX_REMEMBERED_TASKS = 1000
_MAX_OUTPUT_BYTES = 256 << 10
_LOG_CHARS = 4000
_FILE_TOOLS_TIMEOUT_S = 20.0

# The expected results are nobody's but the tests': code under test runs as `agent` and cannot open them.
_RUN_TESTS = "chmod 700 /tests && exec /tests/test.sh"
# What another user put in the place of a reward, or a link to it, is not the tests' word.
_OWN_REWARDS = (
    'for f in reward.json reward.txt; do [ -f "$f" ] && [ ! -L "$f" ] && [ -O "$f" ] && echo "$f"; done; true'
)
_EXISTING = 'for f; do [ -e "$f" ] && printf "%s\\0" "$f"; done; true'


class _Tests(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a task's `tests/`."""

    files: dict[str, bytes]
    executable: frozenset[str]


class HarborGrader:
    """Implements `etude.interfaces.Grader` for tasks with a `tests/test.sh`."""

    def __init__(self, backend: EnvironmentBackend, *, screens: Sequence[Screen] = SCREENS) -> None:
        self._backend = backend
        self._screens = screens
        self._tests: dict[tuple[str, str], _Tests] = {}

    async def grade(self, task: Task, change: Mapping[str, bytes | None]) -> Grade:
        """Apply the change to the task's pristine environment, then place the tests and run them.

        A screen that finds something ends it before anything is run: `held` is set. Whatever keeps the tests from
        giving a valid reward (no file, a late one, a sandbox that dies) gives `reward=None` and a failure whose first
        word is stable: `held`, `sandbox`, `task`, `tests_timeout`, `tests_out_of_memory`, `no_reward`
        or `bad_reward`.
        """
        try:
            if evidence := await asyncio.to_thread(self._screen, task, change):
                return Grade(reward=None, failure=f"held: {evidence}", held=True)
            tests = await self._read_tests(task)
            placed = await asyncio.to_thread(sort_change, change)
            async with self._backend.create(task) as environment:
                return await self._grade_in(environment, task, placed, tests)
        except TaskError as error:
            return Grade(reward=None, failure=f"task: {error}")
        except SandboxError as error:
            return Grade(reward=None, failure=f"sandbox: {error}")

    def _screen(self, task: Task, change: Mapping[str, bytes | None]) -> str:
        return next(filter(None, (screen(task, change) for screen in self._screens)), "")

    async def _grade_in(self, environment: Environment, task: Task, change: Sorted, tests: _Tests) -> Grade:
        await self._apply(environment, task, change)
        await environment.upload(tests.files, executable=tests.executable)
        ran = await environment.execute(
            ["/bin/sh", "-c", _RUN_TESTS],
            timeout_s=task.verifier_timeout_s,
            user="root",
            max_output_bytes=_MAX_OUTPUT_BYTES,
        )
        log = _tail(ran)
        if ran.timed_out:
            reason = f"tests_timeout: the tests were killed after {task.verifier_timeout_s:g} s"
            return Grade(reward=None, failure=reason, log=log)
        if ran.exit_code == -signal.SIGKILL:
            # No code of the agent may do that to root's tests.
            memory = f"tests_out_of_memory: the tests needed more than the {task.memory_mb} MB of the task's memory_mb"
            reason = memory if ran.out_of_memory else "sandbox: the tests were killed from outside of the sandbox"
            return Grade(reward=None, failure=reason, log=log)
        grade = read_verdict(await self._rewards(environment))
        return msgspec.structs.replace(grade, log=log)

    async def _apply(self, environment: Environment, task: Task, change: Sorted) -> None:
        withheld = change.protected.keys() - await self._existing(environment, list(change.protected))
        applied = {path: content for path, content in change.applied.items() if path not in withheld}
        if deleted := [path for path, content in applied.items() if content is None]:
            await self._tool(environment, ["rm", "-f", "--", *deleted])
        await environment.upload(
            {f"{task.workdir.rstrip('/')}/{path}": content for path, content in applied.items() if content is not None}
        )

    async def _existing(self, environment: Environment, paths: list[str]) -> set[str]:
        """Return those of `paths` that the pristine workdir has."""
        if not paths:
            return set()
        ran = await self._tool(environment, ["/bin/sh", "-c", _EXISTING, "sh", *paths])
        return {os.fsdecode(path) for path in ran.stdout.split(b"\0") if path}

    async def _tool(self, environment: Environment, command: list[str], cwd: str | None = None) -> ExecResult:
        """Run a program of the pristine environment, where nothing of the agent has run."""
        ran = await environment.execute(command, timeout_s=_FILE_TOOLS_TIMEOUT_S, user="root", cwd=cwd)
        if ran.exit_code:
            msg = f"{command[0]} failed in the grading sandbox: {ran.stderr[-_LOG_CHARS:].decode(errors='replace')}"
            raise SandboxError(msg)
        return ran

    async def _rewards(self, environment: Environment) -> dict[str, bytes]:
        owned = (await self._tool(environment, ["/bin/sh", "-c", _OWN_REWARDS], cwd=_RESULTS)).stdout.decode().split()
        found: dict[str, bytes] = {}
        for name in owned[:1]:
            found |= await environment.download(f"{_RESULTS}/{name}", max_bytes=MAX_REWARD_BYTES)
        return found

    async def _read_tests(self, task: Task) -> _Tests:
        key = (task.digest, task.path)
        if key not in self._tests:
            if len(self._tests) >= _MAX_REMEMBERED_TASKS:
                self._tests.clear()
            self._tests[key] = await asyncio.to_thread(_read_tests, Path(task.path, "tests"))
        return self._tests[key]


def _read_tests(directory: Path) -> _Tests:
    """Read regular files only, within bounds. Raise `TaskError` for anything else."""
    files: dict[str, bytes] = {}
    executable = {f"{_TESTS}/test.sh"}
    left = _MAX_TEST_BYTES
    for folder, folders, names in os.walk(directory):
        for name in sorted((*names, *(name for name in folders if Path(folder, name).is_symlink()))):
            path = Path(folder, name)
            status = path.lstat()
            left -= status.st_size
            if not stat.S_ISREG(status.st_mode) or left < 0 or len(files) >= _MAX_TEST_FILES:
                msg = (
                    f"{path}: tests must be regular files, at most {_MAX_TEST_FILES} and {_MAX_TEST_BYTES} bytes in all"
                )
                raise TaskError(msg)
            inside = f"{_TESTS}/{path.relative_to(directory).as_posix()}"
            files[inside] = path.read_bytes()
            if status.st_mode & stat.S_IXUSR:
                executable.add(inside)
    if f"{_TESTS}/test.sh" not in files:
        msg = f"{directory / 'test.sh'}: not found; it is what grades the task"
        raise TaskError(msg)
    return _Tests(files=files, executable=frozenset(executable))


def _tail(ran: ExecResult) -> str:
    return (ran.stdout + ran.stderr).decode(errors="replace")[-_LOG_CHARS:]
