"""The local backend: sandboxes on this host, as strongly confined as its kernel allows."""

import asyncio
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from etude.environments.framing import encode
from etude.environments.image import Image, read_image
from etude.environments.keeper import Keeper, RestartBudget
from etude.environments.launcher import Settings
from etude.environments.lease import HeldLease, lease_of_this_process
from etude.environments.probe import Findings, probe
from etude.environments.reaping import reap
from etude.environments.register import Register
from etude.environments.sandbox import LocalEnvironment
from etude.errors import SandboxError
from etude.interfaces import Capabilities, Clock, Ledger
from etude.telemetry.clock import SystemClock
from etude.telemetry.doubles import NO_LEDGER
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

    def __init__(self, lease: HeldLease, settings: Settings, ledger: Ledger, clock: Clock) -> None:
        self._lease = lease
        self._register = Register(ledger, settings.backend)
        self._keeper = Keeper(
            settings,
            lease,
            RestartBudget(clock),
            on_gone=self._register.destroyed,
            on_death=self._lose_all,
            on_cleaned=lambda: self._register.all_destroyed("launcher_died"),
        )
        self._alive: set[LocalEnvironment] = set()
        self._messages: dict[tuple[str, str], bytes] = {}
        self._findings = Findings()

    @classmethod
    async def start(
        cls,
        *,
        mounts: Mapping[str, Path] | None = None,
        namespaces: bool = True,
        run: str = "",
        ledger: Ledger = NO_LEDGER,
        clock: Clock | None = None,
    ) -> "LocalBackend":
        """Start the backend: remove what dead owners left on this host, then find out what this host enforces.

        Args:
            mounts: Directories of the host to show read-only, by absolute path inside the sandbox.
            namespaces: False does without them even where the kernel grants them, to see what a weaker host would do.
            run: What the sandboxes are for, as `census.living` gives it to other processes.
            ledger: Told of every sandbox.
            clock: Times the restarts of the launcher.

        Raises:
            SandboxError: No sandbox can be made at all.
            StoreError: The ledger cannot be written.
        """
        base = sys.base_prefix
        settings = Settings(
            backend=secrets.token_hex(4),
            mounts=[(str(path.resolve()), place) for place, path in (mounts or {}).items()],
            interpreter="" if Path(base).is_relative_to("/usr") else base,
            namespaces=namespaces,
        )
        await asyncio.to_thread(reap)
        lease = await asyncio.to_thread(HeldLease, lease_of_this_process(settings.backend, run=run))
        backend = cls(lease, settings, ledger, clock or SystemClock())
        try:
            backend._findings = await probe(backend._open_bare, lambda: backend._keeper.welcome, lease.path)
        except BaseException:
            await backend.close()
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
        """Of the process that all sandboxes are children of; 0 while a dead one is being replaced."""
        return self._keeper.process_id

    @property
    def name(self) -> str:
        """What the names of this backend's sandboxes begin with."""
        return self._lease.lease.backend

    @asynccontextmanager
    async def create(self, task: Task, *, model_port: int | None = None) -> AsyncGenerator[LocalEnvironment, None]:
        """Open a fresh sandbox; see `EnvironmentBackend.create`. Leaving the block does not wait for its end.

        Raises:
            TaskError: The task's environment needs more than this backend can do.
            SandboxError: The sandbox could not be made.
            StoreError: The ledger cannot be written.
        """
        message = await self._specification(task)
        async with self._open(task, message, _PIDS, model_port=model_port) as environment:
            yield environment

    async def close(self) -> None:
        """Destroy what is left, and wait until it is gone. What cannot be removed is left to the next backend."""
        if await self._keeper.close():
            self._register.all_destroyed()
            await asyncio.to_thread(self._lease.release)

    def _open_bare(self, task: Task, image: Image, pids: int) -> AbstractAsyncContextManager[LocalEnvironment]:
        return self._open(task, specification(task, image, pids=pids), pids, model_port=None)

    @asynccontextmanager
    async def _open(
        self, task: Task, message: bytes, pids: int, *, model_port: int | None
    ) -> AsyncGenerator[LocalEnvironment, None]:
        launcher = await self._keeper.launcher()
        name = await self._register.take()
        request = {
            "name": name,
            # Files of a sandbox lie in memory, so its storage counts there; its first process keeps the pristine ones.
            "memory_bytes": task.memory_mb * _MIB + storage_bytes(task) + _RESERVED_BYTES + len(message),
            "pids": pids,
            "cpus": task.cpus,
            "listen": model_port is not None,
        }
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._register.destroyed(name)
            msg = f"sandbox {name} cannot be made: {error}; raise ulimit -n or lower environment.concurrency"
            raise SandboxError(msg) from error
        ours.setblocking(False)
        environment = LocalEnvironment(name, ours)
        self._alive.add(environment)
        try:
            with theirs:
                process_id = await launcher.spawn(request, theirs)
            await environment.open(message, process_id=process_id, model_port=model_port)
            yield environment
        finally:
            self._alive.discard(environment)
            launcher.kill(name)
            await environment.close()

    def _lose_all(self) -> None:
        for environment in self._alive:
            environment.lose("the launcher of all sandboxes died, which is started anew")

    async def _specification(self, task: Task) -> bytes:
        """Return the message for a task, which is remembered as long as there is room."""
        key = (task.digest, task.path)
        if key not in self._messages:
            if sum(map(len, self._messages.values())) > _MAX_REMEMBERED_BYTES:
                self._messages.clear()
            self._messages[key] = await asyncio.to_thread(_read_specification, task)
        return self._messages[key]


def _read_specification(task: Task) -> bytes:
    return specification(task, read_image(task), pids=_PIDS)


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
