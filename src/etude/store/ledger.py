"""One process's part of the run ledger."""

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from etude.errors import ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.store.keys import check_key
from etude.store.ledger_format import BATCH_BYTES, MAX_LINE_BYTES, MAX_SEGMENT_BYTES, SEGMENT_BYTES, segment_key
from etude.store.ledger_segments import SegmentWriter
from etude.store.local import FileStore
from etude.telemetry.clock import wall_time
from etude.telemetry.events import Closed, Opened

_TICK_S = 0.2
"""How long a fact waits for the disk when nobody asks for it."""
_UPLOAD_S = 3.0
_DISK_S = 30.0
"""Longer than any pause of a sound disk."""


class LedgerWriter:
    """A `Ledger` in a folder of its own, `ledger/<writer>/`; an async context manager whose end records `closed`.

    `record` may be called from any thread; the rest belongs to the event loop that entered it. Facts go to the disk
    from a thread of their own, so that neither the event loop nor who records waits for it.
    """

    def __init__(
        self, segments: SegmentWriter, *, writer: str, far: ObjectStore | None, wall: Callable[[], float] = wall_time
    ) -> None:
        """Use `open` instead. `far` is where segments are put, None when they are in the run directory already."""
        self.writer = writer
        """Folder name."""
        self._segments = segments
        self._far = far
        self._wall = wall
        self._encode = msgspec.json.Encoder().encode
        self._lines: deque[bytes] = deque()
        self._failure: StoreError | None = None
        self._waiters: deque[Future[None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._write_until_stopped, name="ledger", daemon=True)
        self._put_sizes: dict[int, int] = {}
        self._putting = asyncio.Lock()
        self._uploads: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        local: Path | None,
        service: str,
        run_id: str,
        *,
        opened: Opened | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> "LedgerWriter":
        """Begin a ledger in a folder that nobody ever wrote to; enter it with `async with`.

        Args:
            store: The run directory.
            local: The same directory as a path, or this machine's directory for what belongs to a run that is far
                away. None: the store's own.
            service: `controller`, `trainer`, or a sampler's id.
            run_id: From `open_run_id`.
            opened: The first fact, when it says more than the service's name.
            segment_bytes: Text after which a segment is ended.

        Raises:
            StoreError: The disk refuses.
        """
        writer = check_key(f"{service}-{secrets.token_hex(4)}")
        root, is_far = _root(store, local)
        segments = SegmentWriter(root, writer=writer, run_id=run_id, segment_bytes=segment_bytes)
        ledger = cls(segments, writer=writer, far=store if is_far else None)
        ledger.record(opened or Opened(service=service))
        await asyncio.to_thread(ledger._write_lines)
        return ledger

    @property
    def events(self) -> int:
        """Facts on the disk."""
        return self._segments.events

    @property
    def chain(self) -> str:
        """Chain value after them."""
        return self._segments.chain

    async def __aenter__(self) -> "LedgerWriter":
        self._thread.start()
        if self._far is not None:
            self._uploads = asyncio.create_task(self._upload_now_and_then(), name="upload the ledger")
        return self

    async def __aexit__(self, *_: object) -> None:
        uploads = self._uploads
        if uploads is not None:
            uploads.cancel()
            await asyncio.wait({uploads})
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, _DISK_S)
        if self._thread.is_alive():
            raise self._stalled()
        try:
            await asyncio.to_thread(self._write_last)
        finally:
            self._segments.release()
        await self._upload()

    def record(self, event: msgspec.Struct) -> None:
        """Take a fact; it is on the disk within a fraction of a second.

        Raise `StoreError`, and forget the fact, while the disk does not take the facts before it.
        """
        if self._failure is not None:
            raise StoreError(str(self._failure)) from self._failure
        self._lines.append(self._line(event))

    async def flush(self) -> None:
        """Return when every fact recorded so far is in the run directory."""
        await self.flush_local()
        await self._upload()

    async def flush_local(self) -> None:
        """Return when every fact recorded so far is on this machine's disk, which is enough against `kill -9`."""
        try:
            async with asyncio.timeout(_DISK_S):
                await asyncio.wrap_future(self._asked())
        except TimeoutError as error:
            raise self._stalled() from error

    def flush_now(self) -> None:
        """Like `flush_local`, for a thread that may wait."""
        try:
            self._asked().result(_DISK_S)
        except TimeoutError as error:
            raise self._stalled() from error

    def _asked(self) -> Future[None]:
        """Wake the thread, and return what is done when it has written."""
        waiter: Future[None] = Future()
        self._waiters.append(waiter)
        self._wake.set()
        return waiter

    def _stalled(self) -> StoreError:
        msg = f"the disk of {self._segments.root} took no facts for {_DISK_S:.0f} s; see whether it is full or failing"
        return StoreError(msg)

    def _write_until_stopped(self) -> None:
        while not self._stopping or self._waiters:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            waiters = [self._waiters.popleft() for _ in range(len(self._waiters))]
            try:
                self._write_lines()
            except StoreError as error:
                self._failure = error
            else:
                self._failure = None
            for waiter in waiters:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_exception(self._failure) if self._failure else waiter.set_result(None)

    def _line(self, event: msgspec.Struct) -> bytes:
        line = self._encode(msgspec.structs.replace(event, t=round(self._wall(), 3)))
        if len(line) >= MAX_LINE_BYTES:
            msg = f"a fact of {len(line)} bytes does not fit the ledger: {line[:100]!r}"
            raise ValueError(msg)
        return line + b"\n"

    def _write_last(self) -> None:
        """Write `closed` and the segment's end at once: a ledger that has the one without the other was cut."""
        self._write_lines()
        self._segments.append([self._line(Closed())])
        self._segments.end()

    def _write_lines(self) -> None:
        self._segments.write()
        while batch := self._batch():
            self._segments.append(batch)
            self._segments.write()

    def _batch(self) -> list[bytes]:
        batch: list[bytes] = []
        size = 0
        while self._lines and (not batch or size + len(self._lines[0]) <= BATCH_BYTES):
            batch.append(self._lines.popleft())
            size += len(batch[-1])
        return batch

    async def _upload(self) -> None:
        """Put the segments that have grown, whole; those who wait at the same time share the work."""
        far = self._far
        if far is None:
            return
        async with self._putting:
            for number, size in list(self._segments.sizes.items()):
                if self._put_sizes.get(number) != size:
                    data = await asyncio.to_thread(self._segments.path(number).read_bytes)
                    await far.put(segment_key(self.writer, number), data)
                    self._put_sizes[number] = len(data)

    async def _upload_now_and_then(self) -> None:
        """Failures are told by the next `flush`: until then the facts are safe on the disk."""
        while True:
            await asyncio.sleep(_UPLOAD_S)
            with contextlib.suppress(StoreError):
                await self._upload()


async def upload_spool(store: ObjectStore, local: Path, writers: Sequence[str] = ()) -> None:
    """Put what processes that were killed left in this machine's spool, for a run that is far away.

    All of the spool when no writer is named. A run directory that is local has everything already.
    """
    if not _root(store, local)[1]:
        return
    for path in await asyncio.to_thread(_spooled, local, writers):
        key = f"ledger/{path.parent.name}/{path.name}"
        try:
            stored = await store.get(key, max_bytes=MAX_SEGMENT_BYTES)
        except ObjectMissingError:
            stored = b""
        data = await asyncio.to_thread(path.read_bytes)
        # A writer that is about to end may put more meanwhile; this put must not have the last word then.
        while len(data) > len(stored) and data.startswith(stored):
            await store.put(key, data)
            stored, data = data, await asyncio.to_thread(path.read_bytes)


def _spooled(local: Path, writers: Sequence[str]) -> list[Path]:
    found = sorted(local.glob("ledger/*/*.jsonl.zst"))
    return [path for path in found if not writers or path.parent.name in writers]


def _root(store: ObjectStore, local: Path | None) -> tuple[Path, bool]:
    """Return where segments are written, and whether the run directory is elsewhere."""
    own = store.root if isinstance(store, FileStore) else None
    if own is not None and (local is None or local.resolve() == own):
        return own, False
    if local is None:
        msg = "the ledger of a run that is far away needs a local directory"
        raise ValueError(msg)
    return local, True
