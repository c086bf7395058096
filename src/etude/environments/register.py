"""Names of sandboxes, in the run's ledger before they are used."""

from itertools import count

from etude.interfaces import Ledger
from etude.telemetry.events import SandboxCreated, SandboxDestroyed


class Register:
    """Gives out names of sandboxes, and records which of them are done with."""

    def __init__(self, ledger: Ledger, backend: str) -> None:
        self._ledger = ledger
        self._backend = backend
        self._numbers = count()
        self._open: dict[str, None] = {}

    async def take(self) -> str:
        """Return a fresh name that the ledger knows; raise `StoreError` when it cannot be written.

        On this machine's disk is enough, also for a run in a bucket: without this machine, no sandbox of it lives.
        """
        name = f"{self._backend}-{next(self._numbers)}"
        self._ledger.record(SandboxCreated(sandbox=name))
        self._open[name] = None
        await self._ledger.flush_local()
        return name

    def destroyed(self, name: str, reason: str = "") -> None:
        """Record that a sandbox does not exist, any more or at all; once."""
        if name in self._open:
            del self._open[name]
            self._ledger.record(SandboxDestroyed(sandbox=name, reason=reason))

    def all_destroyed(self, reason: str = "") -> None:
        """Record that no sandbox exists."""
        for name in tuple(self._open):
            self.destroyed(name, reason)
