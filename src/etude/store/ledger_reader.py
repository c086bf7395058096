"""Facts out of a run ledger, each batch checked, in bounded memory."""

from collections.abc import AsyncIterator, Sequence

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.store.ledger_format import MAX_SEGMENT_BYTES, read_run_id, segment_key
from etude.store.ledger_scanner import SegmentScanner
from etude.telemetry.events import AnyEvent, Closed

_KEY_PARTS = 3


async def writers(store: ObjectStore) -> list[str]:
    """Return the folder names of all ledgers of a run, sorted."""
    parts = [key.split("/") for key in await store.list("ledger")]
    return sorted({part[1] for part in parts if len(part) == _KEY_PARTS})


def read_writer(store: ObjectStore, writer: str, *, run_id: str | None = None) -> "LedgerReader":
    """Return a writer's facts: iterate over it once with `async for`, then ask it how the ledger ended.

    `run_id` is looked up when it is not given.
    """
    return LedgerReader(store, writer, run_id=run_id)


class LedgerReader:
    """Yields a writer's facts, a batch at a time, while it may still be writing.

    Iterating raises `IntegrityError`, which names writer, segment and fact, where something other than a torn tail does
    not check, and `ConfigError` for a newer format. Batches before that place were yielded.
    """

    def __init__(self, store: ObjectStore, writer: str, *, run_id: str | None = None) -> None:
        self.writer = writer
        self.events = 0
        """Facts yielded so far."""
        self.chain = ""
        """Chain value after them."""
        self.torn_bytes = 0
        """Bytes at the end that belong to a batch that never was flushed; known after the last batch."""
        self.closed = False
        """Whether the last fact is `closed`."""
        self.ended = False
        """Whether the last segment has its end, which follows `closed`; known after the last batch."""
        self._store = store
        self._run_id = run_id

    def __aiter__(self) -> AsyncIterator[list[AnyEvent]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[list[AnyEvent]]:
        run_id = self._run_id or await read_run_id(self._store)
        scanner = SegmentScanner(run_id, self.writer)
        number = 0
        data = await self._segment(0)
        if data is None:
            msg = f"ledger {self.writer} has no segment 0: restore {segment_key(self.writer, 0)}"
            raise IntegrityError(msg)
        while True:
            for batch in scanner.scan(data):
                yield self._noted(scanner, batch)
            following = await self._following(number)
            if following is None:
                break
            if not scanner.ended:
                # It may have been written to its end since it was read.
                data = await self._segment(number) or b""
                for batch in scanner.scan(data):
                    yield self._noted(scanner, batch)
            scanner.end_before_another()
            number, data = number + 1, following
        self.torn_bytes = scanner.torn_bytes(data)
        self.ended = scanner.ended

    def _noted(self, scanner: SegmentScanner, batch: list[AnyEvent]) -> list[AnyEvent]:
        self.events, self.chain = scanner.events, scanner.chain
        self.closed = isinstance(batch[-1], Closed)
        return batch

    async def _following(self, number: int) -> bytes | None:
        """Return the segment after this one, None when this is the last."""
        data = await self._segment(number + 1)
        if data is not None or not _later(await self._store.list(f"ledger/{self.writer}"), self.writer, number + 1):
            return data
        data = await self._segment(number + 1)
        if data is None:
            msg = f"ledger {self.writer} has segments after number {number + 1}, which is missing: restore it"
            raise IntegrityError(msg)
        return data

    async def _segment(self, number: int) -> bytes | None:
        try:
            return await self._store.get(segment_key(self.writer, number), max_bytes=MAX_SEGMENT_BYTES)
        except ObjectMissingError:
            return None


def _later(keys: Sequence[str], writer: str, number: int) -> bool:
    """Whether the folder holds this segment or a later one."""
    return any(key >= segment_key(writer, number) for key in keys)
