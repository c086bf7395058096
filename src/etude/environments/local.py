"""The local backend: sandboxes on this host, as strongly confined as its kernel allows."""

import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path

from etude.environments.framing import encode
from etude.environments.image import Image, read_image
from etude.environments.launcher import Launcher
from etude.environments.probe import Findings, probe
from etude.environments.sandbox import LocalEnvironment
from etude.interfaces import Capabilities
from etude.types import Task

_MIB = 1 << 20
_PIDS = 256
_MAX_REMEMBERED_BYTES = 256 * _MIB
_SCRATCH_BYTES = 64 * _MIB
"""Storage beyond the task's own, for /tmp and the like."""
_RESERVED_BYTES = 16 * _MIB
"""Memory beyond the task's own, for the sandbox's first process."""


class LocalBackend:
    """Implements `etude.interfaces.EnvironmentBackend`. Made by `start`, ended by `close`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._numbers = count()
        self._messages: dict[tuple[str, str], bytes] = {}
        self._findings = Findings()

    @classmethod
    async def start(cls, *, mounts: Mapping[str, Path] | None = None, namespaces: bool = True) -> "LocalBackend":
        """Start the backend and find out, with sandboxes made for it, what this host enforces.

        Args:
            mounts: Directories of the host to show read-only, by absolute path inside the sandbox.
            namespaces: False does without them even where the kernel grants them, to see what a weaker host would do.

        Raises:
            SandboxError: No sandbox can be made at all.
        """
        base = sys.base_prefix
        interpreter = "" if Path(base).is_relative_to("/usr") else base
        shown = [(str(path.resolve()), place) for place, path in (mounts or {}).items()]
        launcher, welcome = await Launcher.start(shown, interpreter, namespaces=namespaces)
        backend = cls(launcher)
        try:
            backend._findings = await probe(backend._open_bare, welcome)
        except BaseException:
            await launcher.close()
            raise
        return backend

    @property
    def capabilities(self) -> Capabilities:
        """What was seen to be enforced when the backend started."""
        return self._findings.capabilities

    @property
    def limitations(self) -> tuple[str, ...]:
        """One sentence per thing that is not enforced, for people."""
        return self._findings.limitations

    @property
    def process_id(self) -> int:
        """Of the process that all sandboxes are children of."""
        return self._launcher.process_id

    @asynccontextmanager
    async def create(self, task: Task, *, model_port: int | None = None) -> AsyncGenerator[LocalEnvironment, None]:
        """Open a fresh sandbox; see `EnvironmentBackend.create`. Leaving the block does not wait for its end.

        Raises:
            TaskError: The task's environment needs more than this backend can do.
            SandboxError: The sandbox could not be made.
        """
        message = self._specification(task)
        async with self._open(task, message, _PIDS, model_port=model_port) as environment:
            yield environment

    async def close(self) -> None:
        """Destroy what is left, and wait until it is gone."""
        await self._launcher.close()

    def _open_bare(self, task: Task, image: Image, pids: int) -> AbstractAsyncContextManager[LocalEnvironment]:
        return self._open(task, specification(task, image, pids=pids), pids, model_port=None)

    @asynccontextmanager
    async def _open(
        self, task: Task, message: bytes, pids: int, *, model_port: int | None
    ) -> AsyncGenerator[LocalEnvironment, None]:
        name = f"s{next(self._numbers)}"
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        request = {
            "name": name,
            # Files of a sandbox lie in memory, so its storage counts there; its first process keeps the pristine ones.
            "memory_bytes": task.memory_mb * _MIB + storage_bytes(task) + _RESERVED_BYTES + len(message),
            "pids": pids,
            "cpus": task.cpus,
            "listen": model_port is not None,
        }
        environment = LocalEnvironment(name, ours)
        try:
            with theirs:
                self._launcher.spawn(request, theirs)
            await environment.open(message, model_port=model_port)
            yield environment
        finally:
            self._launcher.kill(name)
            await environment.close()

    def _specification(self, task: Task) -> bytes:
        """Return the message for a task, which is remembered as long as there is room."""
        key = (task.digest, task.path)
        if key not in self._messages:
            if sum(map(len, self._messages.values())) > _MAX_REMEMBERED_BYTES:
                self._messages.clear()
            self._messages[key] = specification(task, read_image(task), pids=_PIDS)
        return self._messages[key]


def storage_bytes(task: Task) -> int:
    """Size of a sandbox's file system."""
    return task.storage_mb * _MIB + _SCRATCH_BYTES


def specification(task: Task, image: Image, *, pids: int) -> bytes:
    """Return the message that tells a sandbox what it is."""
    header = {
        "storage_bytes": storage_bytes(task),
        "pids": pids,
        "workdir": task.workdir,
        "env": image.env | task.env,
        "files": [(file.path, len(file.content), file.executable) for file in image.files],
    }
    return encode(header, b"".join(file.content for file in image.files))
