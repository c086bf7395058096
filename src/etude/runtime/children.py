"""Processes that a run starts: they say when they are ready, and end with it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from etude.errors import HostError, PolicyError, RunError

READY = "ready "
"""A child prints this on standard output once it serves, then its URL and the name of its ledger's folder."""

TELLING_CODES = (PolicyError.exit_code, HostError.exit_code)
"""Exit codes by which a child says that the user, or this machine, is to blame: the run ends with the same one."""

_TAIL_BYTES = 2000
_GRACE_S = 10.0
_KILLED_WITHIN_S = 10.0


class Child:
    """One running process, the leader of a session of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.url = ""
        self.writer = ""
        """Folder of its ledger; empty when it keeps none."""
        self._process = process
        self._log = log

    @property
    def process_id(self) -> int:
        """Of the operating system."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, -N when signal N ended it."""
        return self._process.returncode

    async def ended(self) -> int:
        """Wait until the process ends, and return its exit code."""
        return await self._process.wait()

    async def watch(self) -> None:
        """Wait until the process ends, which it should not, and raise `RunError` with the end of its log."""
        code = await self.ended()
        raise self.failure(f"ended with {exit_text(code)}", code)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Read the child's URL; raise `RunError` when it ends first or takes longer than `timeout_s`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                async for line in self._process.stdout:
                    text = line.decode("utf-8", "replace").strip()
                    if text.startswith(READY):
                        self.url, _, self.writer = text.removeprefix(READY).partition(" ")
                        return
                code = await self.ended()
        except TimeoutError as error:
            raise self.failure(f"did not come up within {timeout_s:g} s") from error
        raise self.failure(f"ended with {exit_text(code)} before it was ready", code)

    async def stop(self, *, grace_s: float = _GRACE_S) -> None:
        """Close the child's standard input, which asks it to end; kill it when it has not after `grace_s` seconds."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End the process and all that it started, whatever they are at; raise `HostError` if the kernel does not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILLED_WITHIN_S):
                await self.ended()
        except TimeoutError as error:
            msg = f"the {self.name} (process {self._process.pid}) does not die: a disk or device that it uses hangs"
            raise HostError(msg) from error

    def failure(self, what: str, code: int | None = None, *, lines: int = 1) -> RunError:
        """Return the error for a process that failed, with the last lines of its log and where the others are."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            said = log.read().decode("utf-8", "replace").strip().splitlines()
        last = " | ".join(line.removeprefix("error: ") for line in said[-lines:]) or "nothing"
        error = RunError(f"the {self.name} {what}. It said: {last} (its log is {self._log})")
        if code in TELLING_CODES:
            error.exit_code = code
        return error


async def launch(
    name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Start a program, which the caller stops.

    Its standard input is a pipe that this process holds: when this process dies, however it does, the pipe closes and
    the child ends by itself.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            env=environment,
            # Ctrl-C in a terminal reaches the whole group: the run decides what it means for its children.
            start_new_session=True,
        )
    return Child(name, process, log)


@asynccontextmanager
async def child(
    name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[Child]:
    """Start a program and yield it while it comes up; it is stopped at the end of the block."""
    started = await launch(name, command, log=log, environment=environment)
    try:
        yield started
    finally:
        await asyncio.shield(started.stop())


def exit_text(code: int) -> str:
    """Return an exit code with the name of the signal that it stands for."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"exit code {code}"


def etude_command(*arguments: str) -> tuple[str, ...]:
    """Return the command line of an `etude` process whose log is to hold the traceback of what nobody expected."""
    return (sys.executable, "-m", "etude.cli.main", "--traceback", *arguments)


async def until_parent_gone(work: Coroutine[Any, Any, None]) -> None:
    """Do the work of a child; cancel it when the process that started this one has ended, or wants it to end."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_parent_gone())
    await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _parent_gone() -> None:
    """Return when standard input closes."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass


def say_ready(url: str, writer: str = "") -> None:
    """Tell the parent where this process serves, and the folder of its ledger."""
    sys.stdout.write(f"{READY}{url} {writer}".rstrip() + "\n")
    sys.stdout.flush()
