"""Processes that a run starts: they say when they are ready, and end with it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from etude.errors import HostError, PolicyError, RunError

READY = "ready "
"""A child prints this and its URL on standard output once it serves."""

_TAIL_BYTES = 2000
_GRACE_S = 10.0
_TELLING_CODES = (PolicyError.exit_code, HostError.exit_code)
"""Exit codes by which a child says that the user, or this machine, is to blame: the run ends with the same one."""


class Child:
    """One running process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.url = ""
        self._process = process
        self._log = log

    @property
    def process_id(self) -> int:
        """Of the operating system."""
        return self._process.pid

    async def watch(self) -> None:
        """Wait until the process ends, which it should not, and raise `RunError` with the end of its log."""
        code = await self._process.wait()
        raise self._failure(f"ended with exit code {code}", code)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Read the child's URL; raise `RunError` when it ends first or takes longer than `timeout_s`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                async for line in self._process.stdout:
                    text = line.decode("utf-8", "replace").strip()
                    if text.startswith(READY):
                        self.url = text.removeprefix(READY)
                        return
                code = await self._process.wait()
        except TimeoutError as error:
            raise self._failure(f"did not come up within {timeout_s:g} s") from error
        raise self._failure(f"ended with exit code {code} before it was ready", code)

    async def stop(self) -> None:
        """Close the child's standard input, which asks it to end; kill it when it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _failure(self, what: str, code: int | None = None) -> RunError:
        """Return the error for a process that failed, with the last line of its log and where the others are."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1].removeprefix("error: ") if lines else "nothing"
        error = RunError(f"the {self.name} {what}. It said: {last} (its log is {self._log})")
        if code in _TELLING_CODES:
            error.exit_code = code
        return error


@asynccontextmanager
async def child(
    name: str, command: Sequence[str], *, log: Path, environment: dict[str, str] | None = None
) -> AsyncGenerator[Child]:
    """Start a program and yield it while it comes up; it is stopped at the end of the block.

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
    started = Child(name, process, log)
    try:
        yield started
    finally:
        await asyncio.shield(started.stop())


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


def say_ready(url: str) -> None:
    """Tell the parent where this process serves."""
    sys.stdout.write(f"{READY}{url}\n")
    sys.stdout.flush()
