"""One sandbox of the local backend, seen from outside."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from etude.environments.framing import MAX_BODY_BYTES, PREFIX_BYTES, Header, encode, lengths
from etude.environments.relay import Relay
from etude.errors import SandboxError
from etude.interfaces import ExecResult

_ANSWER_DEADLINE_S = 30.0
"""Beyond the command's own deadline."""
_CHUNK = 1 << 18
_LARGE = 1 << 20
"""Bytes from which copying is no work for an event loop, and the most that it moves before others have a turn."""

_T = TypeVar("_T")


class LocalEnvironment:
    """Implements `etude.interfaces.Environment`. One request at a time; others wait their turn."""

    def __init__(self, environment_id: str, stream: socket.socket) -> None:
        self._id = environment_id
        self._stream = stream
        self._turn = asyncio.Lock()
        self._broken = ""
        self._lost = ""
        self._process_id = 0
        self._relay: Relay | None = None
        self._model_url = ""

    @property
    def environment_id(self) -> str:
        """Unique among all backends; also its name in the run's ledger."""
        return self._id

    @property
    def process_id(self) -> int:
        """Of the sandbox's first process, as this process sees it; 0 until it exists."""
        return self._process_id

    @property
    def model_url(self) -> str:
        """Base URL of the model API as seen from inside; empty if there is none."""
        return self._model_url

    async def open(self, spec: bytes, *, process_id: int, model_port: int | None) -> Header:
        """Hand the sandbox its specification and wait until it is ready. Used by the backend only."""
        self._process_id = process_id
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                await loop.sock_sendall(self._stream, spec)
                await _readable(self._stream)
                prefix, descriptors, _, _ = socket.recv_fds(self._stream, PREFIX_BYTES, 1)
                answer, _ = await self._receive(prefix)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            msg = f"sandbox {self._id} did not come up: {self._lost or error or type(error).__name__}"
            raise SandboxError(msg) from error
        if "error" in answer:
            msg = f"sandbox {self._id} could not be set up: {answer['error']}"
            raise SandboxError(msg)
        if model_port is not None:
            await self._offer_model(descriptors, model_port, contained=answer["contained"])
        return answer

    def lose(self, why: str) -> None:
        """Let what waits for the sandbox fail, now and later: its launcher died. Used by the backend only."""
        self._lost = self._broken = why
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    async def _offer_model(self, descriptors: list[int], port: int, *, contained: bool) -> None:
        if not contained:
            self._model_url = f"http://127.0.0.1:{port}/v1"
            return
        if not descriptors:
            msg = f"sandbox {self._id} has no way to the model: this process has too many open files; raise ulimit -n"
            raise SandboxError(msg)
        listener = socket.socket(fileno=descriptors[0])
        listener.setblocking(False)
        self._model_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self._relay = Relay(listener, port)
        await self._relay.start()

    async def close(self) -> None:
        """Let go of the sandbox: its first process sees the end of the socket and leaves with all others."""
        self._broken = self._broken or "closed"
        self._stream.close()
        if self._relay:
            await self._relay.close()

    async def execute(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "agent",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a program; when it ends or its deadline passes, every process that it started is killed.

        Args:
            command: Program and arguments; a program that cannot be started gives exit code 127 and says why on stderr.
            timeout_s: Seconds until the deadline.
            cwd: Absolute path inside the sandbox; None: the task's working directory.
            env: Added to the sandbox's own variables.
            user: `agent`, or `root`, which owns the sandbox's own files but has no rights on the host.
            max_output_bytes: Kept of stdout and of stderr, each.

        Raises:
            SandboxError: The sandbox died under the command.
        """
        request = {
            "op": "run",
            "argv": list(command),
            "cwd": cwd,
            "env": dict(env or {}),
            "user": user,
            "timeout_s": timeout_s,
            "max_output_bytes": max_output_bytes,
        }
        answer, output = await self._ask(request, deadline_s=timeout_s + _ANSWER_DEADLINE_S)
        if self._relay and self._relay.failure:
            msg = f"sandbox {self._id}: the model API could not be reached from it: {self._relay.failure}"
            raise SandboxError(msg)
        split: int = answer["stdout"]
        return ExecResult(
            exit_code=answer["exit_code"],
            stdout=output[:split],
            stderr=output[split:],
            timed_out=answer["timed_out"],
            truncated=answer["truncated"],
            out_of_memory=answer["out_of_memory"],
            seconds=answer["seconds"],
        )

    async def upload(self, files: Mapping[str, bytes], *, executable: frozenset[str] = frozenset()) -> None:
        """Write files by absolute path; each belongs to the owner of its directory.

        Raises:
            SandboxError: A path is unsafe, leads through a symbolic link, or the sandbox's storage is full.
        """
        listing: list[tuple[str, int, bool]] = []
        for path, content in files.items():
            parts = PurePosixPath(path).parts
            if parts[:1] != ("/",) or not parts[1:] or ".." in parts or "\0" in path:
                msg = f"{path!r} is not an absolute path without '..'; nothing was uploaded to sandbox {self._id}"
                raise SandboxError(msg)
            listing.append((str(PurePosixPath(path)), len(content), path in executable))
        await self._ask({"op": "write", "files": listing}, tuple(files.values()))

    async def download(self, path: str, *, max_bytes: int) -> dict[str, bytes]:
        """Return the regular files at or below `path` by relative path; a file alone under its own name.

        Names that are not UTF-8 are left out.

        Raises:
            SandboxError: Nothing is there, a symbolic link is on the way, or there is more than `max_bytes`.
        """
        found, _ = await self._read({"op": "read", "path": path}, max_bytes)
        return found

    async def changes(self, *, max_bytes: int) -> dict[str, bytes | None]:
        """Return what differs from the task's files in the working directory; see `Environment.changes`."""
        found, gone = await self._read({"op": "changes"}, max_bytes)
        return {**found, **dict.fromkeys(gone)}

    async def _read(self, request: dict[str, Any], max_bytes: int) -> tuple[dict[str, bytes], list[str]]:
        answer, body = await self._ask({**request, "max_bytes": min(max_bytes, MAX_BODY_BYTES)})
        return await _beside(len(body), _cut, answer["files"], body), answer["gone"]

    async def _ask(
        self, request: dict[str, Any], body: Sequence[bytes] = (), *, deadline_s: float = _ANSWER_DEADLINE_S
    ) -> tuple[Header, bytes]:
        async with self._turn:
            if self._broken:
                msg = f"sandbox {self._id} cannot be used any more: {self._broken}"
                raise SandboxError(msg)
            # Cut off in the middle, the stream would give the next request this one's answer.
            self._broken = "a request to it was broken off"
            try:
                async with asyncio.timeout(deadline_s):
                    await self._send(request, body)
                    answer, content = await self._receive(b"")
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self._broken = self._lost or "it died"
                msg = f"sandbox {self._id} died during {request['op']}: {self._lost or error or type(error).__name__}"
                raise SandboxError(msg) from error
            self._broken = ""
        if "error" in answer:
            msg = f"sandbox {self._id}, {request['op']}: {answer['error']}"
            raise SandboxError(msg)
        return answer, content

    async def _send(self, request: dict[str, Any], body: Sequence[bytes]) -> None:
        size = sum(map(len, body))
        pieces = [encode(request, b"".join(body))] if size < _LARGE else [encode(request, body_length=size), *body]
        for piece in pieces:
            await asyncio.get_running_loop().sock_sendall(self._stream, piece)

    async def _receive(self, start: bytes) -> tuple[Header, bytes]:
        prefix = start + await self._exactly(PREFIX_BYTES - len(start))
        header_length, body_length = lengths(prefix)
        header = await self._exactly(header_length)
        return json.loads(header), await self._exactly(body_length)

    async def _exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        pieces: list[bytes] = []
        left = count
        while left:
            piece = await loop.sock_recv(self._stream, min(left, _CHUNK))
            if not piece:
                raise EOFError
            pieces.append(piece)
            left -= len(piece)
            if len(pieces) % (_LARGE // _CHUNK) == 0:  # bytes that are there already are taken without a turn
                await asyncio.sleep(0)
        return await _beside(count, b"".join, pieces)


async def _beside(size: int, work: Callable[..., _T], *args: object) -> _T:
    """Do work on so many bytes, in a thread if they are many."""
    return work(*args) if size < _LARGE else await asyncio.to_thread(work, *args)


def _cut(listing: list[tuple[str, int]], body: bytes) -> dict[str, bytes]:
    """Return files by name from their sizes and their contents one after the other."""
    files: dict[str, bytes] = {}
    position = 0
    for name, size in listing:
        files[name] = body[position : position + size]
        position += size
    return files


async def _readable(stream: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(stream, lambda: None if ready.done() else ready.set_result(None))
    with contextlib.ExitStack() as stack:
        stack.callback(loop.remove_reader, stream)
        await ready
