"""The ledgers of a run's controllers: each names the one before it, and together they are one log."""

import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from etude.errors import IntegrityError
from etude.interfaces import Ledger, ObjectStore
from etude.runtime.directory import RunDirectory
from etude.runtime.run_state import RunFold, RunState
from etude.store.ledger import LedgerWriter, upload_spool
from etude.store.ledger_format import open_run_id
from etude.store.ledger_reader import read_writer, writers
from etude.telemetry.events import AnyEvent, Opened

SERVICE = "controller"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the log."""

    writer: str
    events: int
    """Facts of that writer that lie before it."""


class Journal:
    """A controller's ledger, and the state of the run that its facts make of that of its predecessors.

    State and ledger never differ: what a checkpoint takes from here is exactly what the facts before it say.
    """

    def __init__(self, ledger: Ledger, *, writer: str, follows: bool = False) -> None:
        """Record into `ledger`, whose first fact, `opened`, is recorded already."""
        self.writer = writer
        self.follows = follows
        """Whether there was a controller before this one."""
        self._ledger = ledger
        self._events = 1
        self._fold = RunFold(RunState())
        self._lock = threading.Lock()

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._fold.state()

    @property
    def lineage(self) -> str:
        """Of the run's newest version."""
        return self._fold.lineage

    @property
    def position(self) -> Position:
        """The place after the last fact recorded."""
        return Position(writer=self.writer, events=self._events)

    def begin(self, state: RunState) -> None:
        """Go on from where the predecessors left the run."""
        self._fold = RunFold(state)

    def record(self, event: msgspec.Struct) -> None:
        """Take a fact, from any thread; raise `IntegrityError` when it contradicts those before it."""
        with self._lock:
            self._fold.apply(event)
            self._ledger.record(event)
            self._events += 1

    async def flush(self) -> None:
        """Return when the run directory has every fact recorded so far."""
        await self._ledger.flush()

    async def flush_local(self) -> None:
        """Return when every fact recorded so far survives `kill -9`."""
        await self._ledger.flush_local()


class Log:
    """What the controllers of a run recorded so far, in the order in which they followed each other."""

    def __init__(self, store: ObjectStore, run_id: str, chain: list[tuple[str, Opened]]) -> None:
        """`chain` has every controller's folder with its first fact; `read_log` finds them."""
        self._store = store
        self._run_id = run_id
        self._chain = chain

    @property
    def last(self) -> str:
        """Folder of the last controller; empty when there was none."""
        return self._chain[-1][0] if self._chain else ""

    async def facts(self, after: Position | None = None) -> AsyncIterator[AnyEvent]:
        """Yield all facts, or those after a place in the log."""
        names = [name for name, _ in self._chain]
        start = 0
        if after is not None:
            if after.writer not in names:
                msg = f"the ledger of {after.writer}, which a checkpoint goes on from, is gone: restore ledger/"
                raise IntegrityError(msg)
            start = names.index(after.writer)
        for index in range(start, len(names)):
            skipped = after.events if after is not None and index == start else 0
            # A controller that went on after it was followed by another is not part of the run.
            end = self._chain[index + 1][1].after_events if index + 1 < len(names) else None
            place = 0
            async for batch in read_writer(self._store, names[index], run_id=self._run_id):
                for event in batch:
                    if place >= skipped and (end is None or place < end):
                        yield event
                    place += 1

    async def end(self) -> Opened:
        """Return the first fact of a controller that goes on from here."""
        if not self._chain:
            return Opened(service=SERVICE)
        reader = read_writer(self._store, self.last, run_id=self._run_id)
        async for _ in reader:
            pass
        return Opened(service=SERVICE, after=self.last, after_events=reader.events, after_chain=reader.chain)


async def read_log(store: ObjectStore, run_id: str) -> Log:
    """Return the log of a run.

    Raises:
        IntegrityError: A ledger is damaged, or two controllers go on from the same one.
    """
    following: dict[str, tuple[str, Opened]] = {}
    for name in await writers(store):
        if not name.startswith(f"{SERVICE}-"):
            continue
        opened = await _first_fact(store, name, run_id)
        if opened is None:
            continue
        if opened.after in following:
            other, _ = following[opened.after]
            msg = f"both {name} and {other} go on from {opened.after or 'the start'}: run etude verify on the run"
            raise IntegrityError(msg)
        following[opened.after] = (name, opened)
    chain: list[tuple[str, Opened]] = []
    while (after := chain[-1][0] if chain else "") in following:
        chain.append(following[after])
    return Log(store, run_id, chain)


async def _first_fact(store: ObjectStore, writer: str, run_id: str) -> Opened | None:
    """Return how a controller opened; None when it died before that was on the disk."""
    async for batch in read_writer(store, writer, run_id=run_id):
        return batch[0] if isinstance(batch[0], Opened) else None
    return None


@asynccontextmanager
async def open_journal(run: RunDirectory) -> AsyncGenerator[tuple[Journal, Log]]:
    """Begin the ledger of this controller, and yield it with what its predecessors recorded."""
    run_id = await open_run_id(run.store)
    await upload_spool(run.store, run.local)
    log = await read_log(run.store, run_id)
    opened = await log.end()
    async with await LedgerWriter.open(run.store, run.local, SERVICE, run_id, opened=opened) as ledger:
        await ledger.flush()
        yield Journal(ledger, writer=ledger.writer, follows=bool(opened.after)), log
