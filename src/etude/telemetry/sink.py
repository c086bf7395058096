"""Rows of metrics onto a disk or into a store, each one safe as soon as it is written."""

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from etude.errors import ObjectExistsError, StoreError
from etude.interfaces import ObjectStore
from etude.telemetry.clock import wall_time
from etude.telemetry.rows import MAX_ROW_BYTES, encode_row

_SEGMENT_BYTES = 256 << 10


class JsonlSink:
    """A `MetricSink` that appends to one local file and is its only writer."""

    def __init__(self, path: Path, *, wall: Callable[[], float] = wall_time) -> None:
        """Open or create the file; a last line that a killed writer left unfinished is cut off.

        Raise `StoreError` when another process writes to the file or the disk refuses.
        """
        self._path = path
        self._wall = wall
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            msg = f"cannot write metrics to {path}: {error.strerror}; free the place or choose another run.url"
            raise StoreError(msg) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            msg = f"another process writes metrics to {path}; end it, or choose another run.url"
            raise StoreError(msg) from error
        self._size = self._cut_torn_line()

    def record(self, row: Mapping[str, object]) -> None:
        """Append a row, which the kernel has when this returns: `kill -9` does not lose it, a power failure may."""
        line = encode_row(row, time=self._wall())
        try:
            written = os.pwrite(self._descriptor, line, self._size)
            reason = "" if written == len(line) else "the disk is full"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            os.ftruncate(self._descriptor, self._size)
            msg = f"cannot write metrics to {self._path}: {reason}; free some space and run the same command again"
            raise StoreError(msg)
        self._size += len(line)

    def close(self) -> None:
        """Let another writer in."""
        os.close(self._descriptor)

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._descriptor).st_size
        tail_start = max(0, size - MAX_ROW_BYTES)
        tail = os.pread(self._descriptor, MAX_ROW_BYTES, tail_start)
        newline = tail.rfind(b"\n")
        if newline < 0 and tail_start > 0:
            msg = f"{self._path} is not a file of metrics; move it away and start again"
            raise StoreError(msg)
        kept = tail_start + newline + 1
        os.ftruncate(self._descriptor, kept)
        return kept


class StoreSink:
    """A `MetricSink` for a run in an object store, which cannot append: rows go into numbered objects of about 256 KiB.

    `record` only remembers; the rows are safe when `flush` returns.
    """

    def __init__(self, store: ObjectStore, prefix: str, *, wall: Callable[[], float] = wall_time) -> None:
        """Write to `<prefix>/<n>.jsonl`; no other writer uses that prefix."""
        self._store = store
        self._prefix = prefix
        self._wall = wall
        self._segment = -1
        self._lines: list[bytes] = []
        self._flushed = 0

    def record(self, row: Mapping[str, object]) -> None:
        """Remember a row until the next `flush`."""
        self._lines.append(encode_row(row, time=self._wall()))

    async def flush(self) -> None:
        """Write what was recorded; raise `StoreError`, and remember it still, when the store fails."""
        if self._flushed == len(self._lines):
            return
        count = len(self._lines)
        data = b"".join(self._lines[:count])
        if self._segment < 0:
            self._segment = await self._create(data)
        else:
            await self._store.put(self._key(self._segment), data)
        self._flushed = count
        if len(data) > _SEGMENT_BYTES:
            del self._lines[:count]
            self._segment, self._flushed = -1, 0

    async def _create(self, data: bytes) -> int:
        """Start a segment after those of earlier writers; a listing that lags is no reason to overwrite one."""
        segment = len(await self._store.list(self._prefix))
        while True:
            try:
                await self._store.put(self._key(segment), data, create_only=True)
            except ObjectExistsError:
                segment += 1
            else:
                return segment

    def _key(self, segment: int) -> str:
        return f"{self._prefix}/{segment:06d}.jsonl"
