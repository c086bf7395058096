"""The backend's side of the zygote: starts it, asks it for sandboxes, hears which ones are gone."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import etude
from etude.errors import SandboxError

_MAX_MESSAGE = 1 << 16
_START_DEADLINE_S = 30.0
_MADE_DEADLINE_S = 30.0
_END_DEADLINE_S = 10.0
_REASON_BYTES = 500
_MAX_ASKED = 64
"""Sandboxes asked for at once; more would not fit into the socket."""

_COMMAND = ["/sbin/init", "-sSPB"]
ARGUMENTS = "\0".join(_COMMAND).encode() + b"\0"
"""What /proc says of a zygote and of every sandbox's first process."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote is told."""

    backend: str
    mounts: list[tuple[str, str]]
    interpreter: str
    namespaces: bool


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote says of itself."""

    problem: str
    """Why sandboxes have no namespaces of their own; empty when they have."""
    controllers: tuple[str, ...]
    """Control-group controllers that it can use."""


class Launcher:
    """Owns one zygote process."""

    def __init__(
        self,
        control: socket.socket,
        process: subprocess.Popen[bytes],
        *,
        on_gone: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._control = control
        self._process = process
        self._on_gone = on_gone
        self._on_end = on_end
        self._asked: dict[str, asyncio.Future[int]] = {}
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._room = asyncio.Semaphore(_MAX_ASKED)
        self._ended = False
        asyncio.get_running_loop().add_reader(control, self._hear)

    @classmethod
    async def start(
        cls, settings: Settings, *, on_gone: Callable[[str], None], on_end: Callable[[], None]
    ) -> tuple["Launcher", Welcome]:
        """Start a zygote.

        Args:
            settings: What it is told.
            on_gone: Told the name of each sandbox that does not exist, any more or at all.
            on_end: Called when the zygote ends before it is closed; what became of its sandboxes is not known then.

        Returns:
            The launcher, and what its zygote says of itself.

        Raises:
            SandboxError: The zygote does not come up.
        """
        try:
            control, process = await asyncio.to_thread(_start_process)
        except OSError as error:
            msg = f"the sandbox launcher {sys.executable} cannot be started: {error}; free memory, processes or files"
            raise SandboxError(msg) from error
        control.setblocking(False)
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(control, msgspec.json.encode(settings))
                reply = await loop.sock_recv(control, _MAX_MESSAGE)
        except (OSError, TimeoutError) as error:
            reply = b""
            cause: BaseException | None = error
        else:
            cause = None
        if not reply:
            control.close()
            process.kill()
            _, said = await asyncio.to_thread(process.communicate)
            reason = said[-_REASON_BYTES:].decode(errors="replace").strip() or repr(cause)
            place = f"{sys.executable} with PYTHONHOME={sys.base_prefix}"
            msg = f"the sandbox launcher does not start under {place}: {reason}"
            raise SandboxError(msg) from cause
        assert process.stderr
        process.stderr.close()
        launcher = cls(control, process, on_gone=on_gone, on_end=on_end)
        return launcher, msgspec.json.decode(reply, type=Welcome)

    @property
    def process_id(self) -> int:
        """Of the zygote."""
        return self._process.pid

    async def spawn(self, request: dict[str, Any], stream: socket.socket) -> int:
        """Make a sandbox that answers at the other end of `stream`, and return the number of its first process.

        Raises:
            SandboxError: The launcher is gone, does not answer, or could not make it.
        """
        name: str = request["name"]
        async with self._room:
            made = self._asked[name] = asyncio.get_running_loop().create_future()
            try:
                socket.send_fds(self._control, [json.dumps({"op": "spawn", **request}).encode()], [stream.fileno()])
                self._gone[name] = asyncio.get_running_loop().create_future()
                async with asyncio.timeout(_MADE_DEADLINE_S):
                    return await made
            except TimeoutError as error:
                self._process.kill()
                msg = f"the sandbox launcher (process {self.process_id}) did not answer for {_MADE_DEADLINE_S:.0f} s"
                raise SandboxError(f"{msg} and was killed; the next sandbox gets a new one") from error
            except OSError as error:
                self._on_gone(name)
                reason = "it has died" if self._ended else str(error)
                msg = f"the sandbox launcher cannot make sandbox {name}: {reason}; the next sandbox gets a new one"
                raise SandboxError(msg) from error
            finally:
                self._asked.pop(name).cancel()

    def kill(self, name: str) -> None:
        """End a sandbox; it is gone a moment later."""
        if not self._ended and name in self._gone:
            # What cannot be sent is not needed: the end of its own socket ends a sandbox, too.
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"op": "kill", "name": name}).encode())

    async def close(self) -> None:
        """End every sandbox and the zygote, and wait until they are gone."""
        for name in self._gone:
            self.kill(name)
        if self._gone:
            await asyncio.wait(self._gone.values(), timeout=_END_DEADLINE_S)
        self._on_end = _nothing
        self._end()
        try:
            await asyncio.to_thread(self._process.wait, _END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _hear(self) -> None:
        try:
            message = self._control.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._end()
            return
        match json.loads(message):
            case {"made": name, "pid": pid}:
                if (made := self._asked.get(name)) and not made.done():
                    made.set_result(pid)
            case {"failed": name, "error": error}:
                if (made := self._asked.get(name)) and not made.done():
                    made.set_exception(_refused(name, error))
            case {"gone": name}:
                if (gone := self._gone.pop(name, None)) and not gone.done():
                    gone.set_result(None)
                self._on_gone(name)
            case _:
                self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for name, made in self._asked.items():
            if not made.done():
                made.set_exception(_refused(name, "the launcher died"))
        self._on_end()
        for gone in self._gone.values():
            if not gone.done():
                gone.set_result(None)
        self._gone.clear()


def _refused(name: str, reason: str) -> SandboxError:
    return SandboxError(
        f"sandbox {name} could not be made: {reason}; see that control groups, open files, processes and memory of "
        "this host have room, or lower environment.concurrency"
    )


def _nothing() -> None:
    """Do nothing at an end that was asked for."""


def _start_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a clean interpreter: no environment but its own home, neutral arguments, the program from stdin."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = str(Path(etude.__file__).parent.parent)
    call = f"from etude.environments.zygote import main; main({theirs.fileno()})"
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            process = subprocess.Popen(
                _COMMAND,
                executable=os.path.realpath(sys.executable),
                env={"PYTHONHOME": sys.base_prefix},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )
        undo.pop_all()
    assert process.stdin
    with process.stdin:
        process.stdin.write(f"import sys; sys.path.insert(0, {source!r}); {call}".encode())
    return ours, process
