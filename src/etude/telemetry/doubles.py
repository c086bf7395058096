"""Ledgers that reach no disk."""

import msgspec


class MemoryLedger:
    """A `Ledger` that keeps what it is told, for tests and for parts used outside of a run."""

    def __init__(self) -> None:
        self.events: list[msgspec.Struct] = []

    def record(self, event: msgspec.Struct) -> None:
        """Keep a fact."""
        self.events.append(event)

    async def flush(self) -> None:
        """Do nothing: memory is as safe as it gets."""

    async def flush_local(self) -> None:
        """Do nothing."""


class NoLedger:
    """A `Ledger` that forgets: for parts used outside of a run, which has nothing to prove."""

    def record(self, event: msgspec.Struct) -> None:
        """Forget a fact."""

    async def flush(self) -> None:
        """Do nothing."""

    async def flush_local(self) -> None:
        """Do nothing."""


NO_LEDGER = NoLedger()
