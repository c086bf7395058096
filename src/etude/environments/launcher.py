"""The backend's side of the zygote: starts it, asks it for sandboxes, hears which ones are gone."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

import etude
from etude.errors import SandboxError

_MAX_MESSAGE = 1 << 16
_START_DEADLINE_S = 30.0
_END_DEADLINE_S = 10.0
_REASON_BYTES = 500


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote says of itself."""

    problem: str
    """Why sandboxes have no namespaces of their own; empty when they have."""
    controllers: tuple[str, ...]
    """Control-group controllers that it can use."""


class Launcher:
    """Owns one zygote process."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._control = control
        self._process = process
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._ended = False
        asyncio.get_running_loop().add_reader(control, self._hear)

    @classmethod
    async def start(
        cls, mounts: list[tuple[str, str]], interpreter: str, *, namespaces: bool
    ) -> tuple["Launcher", Welcome]:
        """Start a zygote.

        Returns:
            The launcher, and what its zygote says of itself.

        Raises:
            SandboxError: The zygote does not come up.
        """
        control, process = await asyncio.to_thread(_start_process)
        control.setblocking(False)
        settings = {"mounts": mounts, "interpreter": interpreter, "namespaces": namespaces}
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(control, json.dumps(settings).encode())
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
        return cls(control, process), msgspec.json.decode(reply, type=Welcome)

    @property
    def process_id(self) -> int:
        """Of the zygote."""
        return self._process.pid

    def spawn(self, request: dict[str, Any], stream: socket.socket) -> None:
        """Ask for a sandbox that answers at the other end of `stream`. Raise `SandboxError` when the zygote is gone."""
        name: str = request["name"]
        self._gone[name] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._control, [json.dumps({"op": "spawn", **request}).encode()], [stream.fileno()])
        except OSError as error:
            del self._gone[name]
            msg = f"the sandbox launcher cannot take a request ({error}); restart the run"
            raise SandboxError(msg) from error

    def kill(self, name: str) -> None:
        """End a sandbox; it is gone a moment later."""
        if not self._ended and name in self._gone:
            # What cannot be sent is not needed: the end of its own socket ends a sandbox, too.
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"op": "kill", "name": name}).encode())

    async def close(self) -> None:
        """End every sandbox and the zygote, and wait until they are gone."""
        for name in tuple(self._gone):
            self.kill(name)
        if self._gone:
            await asyncio.wait(self._gone.values(), timeout=_END_DEADLINE_S)
        if not self._ended:
            self._end()
        self._control.close()
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
        gone = self._gone.pop(json.loads(message)["gone"], None)
        if gone and not gone.done():
            gone.set_result(None)

    def _end(self) -> None:
        self._ended = True
        asyncio.get_running_loop().remove_reader(self._control)
        for gone in self._gone.values():
            if not gone.done():
                gone.set_result(None)
        self._gone.clear()


def _start_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a clean interpreter: no environment but its own home, neutral arguments, the program from stdin."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = str(Path(etude.__file__).parent.parent)
    call = f"from etude.environments.zygote import main; main({theirs.fileno()})"
    process = subprocess.Popen(
        ["/sbin/init", "-sSPB"],
        executable=os.path.realpath(sys.executable),
        env={"PYTHONHOME": sys.base_prefix},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        cwd="/",
    )
    theirs.close()
    assert process.stdin
    with process.stdin:
        process.stdin.write(f"import sys; sys.path.insert(0, {source!r}); {call}".encode())
    return ours, process
