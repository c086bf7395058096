"""The first process of a sandbox: answers its backend over an inherited socket. Standard library only.

One request at a time. When the socket ends, so does this process, and with it everything in its pid namespace.
"""

import errno
import os
import signal
import socket
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from etude.environments.commands import Command, Runner, kill_descendants
from etude.environments.files import Files
from etude.environments.framing import Header, encode, receive

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EXECUTABLE, _PLAIN = 0o755, 0o644


class Place(NamedTuple):
    """Where an agent finds itself."""

    root: str
    """Directory that stands for `/`; anything but `/` where the host grants no mount namespace."""
    alone: bool
    """Whether this process is the first of its own pid namespace."""
    user_ids: dict[str, int | None]
    """Number to become per user; None stays what this process is."""
    memory_events: int = -1
    """Descriptor of the file that counts what the memory limit did; -1 without a limit."""
    path: str = ""
    """Put before the usual search path of commands."""


class Agent:
    """Serves requests until the owner goes away."""

    def __init__(self, stream: socket.socket, place: Place, spec: Header) -> None:
        self._stream = stream
        self._place = place
        self._env: dict[str, str] = spec["env"]
        self._workdir: str = spec["workdir"]
        self._pristine: dict[str, bytes] = {}
        self._files = Files(place.root)
        self._runner = Runner(stream, alone=place.alone, memory_events=place.memory_events)

    def prepare(self, spec: Header, body: bytes) -> None:
        """Place the task's files; the working directory belongs to `agent`."""
        self._files.give_directory(self._workdir, self._place.user_ids["agent"])
        self._write(spec["files"], body)
        workdir = self._workdir.rstrip("/") + "/"
        self._pristine = {
            path[len(workdir) :]: content for path, content in _split(spec["files"], body) if path.startswith(workdir)
        }

    def serve(self) -> None:
        """Answer requests; never returns."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while True:
            try:
                request, body = receive(self._stream)
            except (EOFError, OSError):
                self.leave()
            try:
                answer = self._answer(request, body)
            except (OSError, ValueError) as error:
                full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                answer = encode({"error": f"{error}; the task's storage_mb is used up" if full else str(error)})
            self._stream.sendall(answer)

    def leave(self) -> NoReturn:
        """End this process and all that it started."""
        if not self._place.alone:
            kill_descendants(os.getpid())
        os._exit(0)

    def _answer(self, request: Header, body: bytes) -> bytes:
        match request["op"]:
            case "run":
                return self._run(request)
            case "write":
                self._write(request["files"], body)
                return encode({})
            case "read":
                return _listing(*self._files.read(request["path"], request["max_bytes"], {}))
            case "changes":
                return _listing(*self._files.read(self._workdir, request["max_bytes"], self._pristine))
            case other:
                msg = f"unknown request {other!r}"
                raise ValueError(msg)

    def _write(self, files: list[tuple[str, int, bool]], body: bytes) -> None:
        executables = {path for path, _, executable in files if executable}
        for path, content in _split(files, body):
            self._files.write(path, content, _EXECUTABLE if path in executables else _PLAIN)

    def _run(self, request: Header) -> bytes:
        user: str = request["user"]
        if user not in self._place.user_ids:
            msg = f"no user {user!r} in the sandbox; there are {', '.join(self._place.user_ids)}"
            raise ValueError(msg)
        command = Command(
            argv=[self._translate(argument) for argument in request["argv"]],
            cwd=self._inside(request["cwd"] or self._workdir),
            env=self._environment(user, request["env"]),
            user_id=self._place.user_ids[user],
            timeout_s=request["timeout_s"],
            max_output_bytes=request["max_output_bytes"],
        )
        ending = self._runner.run(command)
        header = {
            "exit_code": ending.exit_code,
            "timed_out": ending.timed_out,
            "truncated": ending.truncated,
            "out_of_memory": ending.out_of_memory,
            "seconds": ending.seconds,
            "stdout": len(ending.stdout),
        }
        return encode(header, bytes(ending.stdout + ending.stderr))

    def _environment(self, user: str, extra: dict[str, str]) -> dict[str, str]:
        home = "/root" if user == "root" else "/home/agent"
        path = f"{self._place.path}:{_PATH}" if self._place.path else _PATH
        usual = {"PATH": path, "HOME": self._inside(home), "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
        if self._place.root != "/":
            usual |= {"ETUDE_ROOT": self._place.root, "TMPDIR": self._inside("/tmp")}
        return usual | {name: self._translate(value) for name, value in (self._env | extra).items()}

    def _inside(self, path: str) -> str:
        return path if self._place.root == "/" else self._place.root + path

    def _translate(self, text: str) -> str:
        """Where the sandbox's root is only a directory, point an argument that names one of its files there."""
        if self._place.root == "/" or not text.startswith("/"):
            return text
        first = text.split("/")[1]
        return self._inside(text) if first and os.path.lexists(f"{self._place.root}/{first}") else text


def _split(files: list[tuple[str, int, bool]], body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files that a message carries one after the other."""
    position = 0
    for path, size, _ in files:
        yield path, body[position : position + size]
        position += size


def _listing(found: dict[str, bytes], gone: list[str]) -> bytes:
    sizes = [[path, len(content)] for path, content in found.items()]
    return encode({"files": sizes, "gone": gone}, b"".join(found.values()))
