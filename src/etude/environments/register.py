"""Names of sandboxes, in the run's ledger before they are used."""

import asyncio

from etude.interfaces import Ledger
from etude.telemetry.events import SandboxCreated, SandboxDestroyed

_BLOCK = 32


class Register:
    """Gives out names that are safely in the ledger, and records there which are done with.

    A fact must be safe before what it speaks of exists, and a flush of a run in a bucket is an upload. So names are
    recorded and flushed a block at a time; those left over at the end are recorded as `unused`.
    """

    def __init__(self, ledger: Ledger, backend: str) -> None:
        self._ledger = ledger
        self._backend = backend
        self._given = 0
        self._free: list[str] = []
        self._open: dict[str, None] = {}
        self._turn = asyncio.Lock()

    async def take(self) -> str:
        """Return a fresh name; raise `StoreError` when the ledger cannot be written."""
        async with self._turn:
            if not self._free:
                names = [f"{self._backend}-{self._given + number}" for number in range(_BLOCK)]
                for name in names:
                    self._ledger.record(SandboxCreated(sandbox=name))
                self._given += _BLOCK
                self._open |= dict.fromkeys(names)
                await self._ledger.flush()
                self._free = names[::-1]
            return self._free.pop()

    def destroyed(self, name: str, reason: str = "") -> None:
        """Record that a sandbox is gone, once."""
        if name in self._open:
            del self._open[name]
            self._ledger.record(SandboxDestroyed(sandbox=name, reason=reason))

    def all_destroyed(self, reason: str) -> None:
        """Record that every sandbox which was made is gone."""
        for name in [name for name in self._open if name not in self._free]:
            self.destroyed(name, reason)

    async def close(self) -> None:
        """Record what is left of the names; raise `StoreError` when the ledger cannot be written."""
        for name in tuple(self._free):
            self.destroyed(name, "unused")
        self._free = []
        await self._ledger.flush()
