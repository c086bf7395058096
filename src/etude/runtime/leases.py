"""Keeps the leases of a supervisor's processes in the run directory."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from etude.errors import EtudeError
from etude.interfaces import ObjectStore
from etude.runtime.children import Child
from etude.runtime.services import Lease, lease_key, this_host
from etude.telemetry.clock import wall_time
from etude.telemetry.waits import waiting

_RENEWALS = 3
"""Times that a lease is renewed before it would expire."""
_WRITTEN_WITHIN_S = 60.0


class LeaseBook:
    """Writes services/<name>.json, in one owned task; an async context manager.

    A lease that cannot be written is reported and written later: what processes do does not depend on it.
    """

    def __init__(self, store: ObjectStore, *, lease_s: float, note: Callable[[str], None] = lambda _: None) -> None:
        self._store = store
        self._lease_s = lease_s
        self._note = note
        self._leases: dict[str, Lease] = {}
        self._changed = asyncio.Event()
        self._children: dict[str, Child] = {}
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    async def __aenter__(self) -> "LeaseBook":
        self._task = asyncio.create_task(self._renew(), name="leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._write()

    def began(self, name: str, kind: str, child: Child, *, restarts: int) -> None:
        """Note that a process was started."""
        self._children[name] = child
        now = wall_time()
        self._leases[name] = Lease(
            name=name,
            kind=kind,
            pid=child.process_id,
            host=this_host(),
            url="",
            writer="",
            started=now,
            expires=now + self._lease_s,
            restarts=restarts,
        )
        self._changed.set()

    def came_up(self, name: str) -> None:
        """Note that a process serves."""
        child = self._children[name]
        self._leases[name] = msgspec.structs.replace(self._leases[name], url=child.url, writer=child.writer)
        self._changed.set()

    def ended(self, name: str, reason: str) -> None:
        """Note that a process is gone."""
        self._leases[name] = msgspec.structs.replace(self._leases[name], ended=wall_time(), reason=reason)
        self._changed.set()

    async def _renew(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / _RENEWALS):
                    await self._changed.wait()
            self._changed.clear()
            self._extend()
            await self._write()

    def _extend(self) -> None:
        expires = wall_time() + self._lease_s
        for name, lease in self._leases.items():
            if not lease.ended:
                self._leases[name] = msgspec.structs.replace(lease, expires=expires)

    async def _write(self) -> None:
        try:
            async with waiting("leases", owner="supervisor", on="store", deadline_s=_WRITTEN_WITHIN_S):
                for name, lease in list(self._leases.items()):
                    await self._store.put(lease_key(name), msgspec.json.encode(lease))
        except EtudeError as error:
            if not self._complained:
                self._note(f"leases cannot be written, which goes on being tried: {error}")
            self._complained = True
        else:
            self._complained = False
