"""Batches of facts onto a local disk: chained, compressed, in segments."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zstandard

from etude.errors import StoreError
from etude.store.explaining import explain
from etude.store.ledger_format import FORMAT, SEGMENT_BYTES, SegmentLine, chain_line, compressor, segment_key


class SegmentWriter:
    """Appends to the segments of one writer. Not for two threads at once.

    What the disk refused is kept: the next `write` goes on where the last one stopped.
    """

    def __init__(self, root: Path, *, writer: str, run_id: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Write below `root`, the run directory or a spool in its shape; nothing is created yet."""
        self.events = 0
        """Facts that are written."""
        self.chain = ""
        """Chain value after them."""
        self.sizes: dict[int, int] = {}
        """Bytes written, by segment."""
        self.root = root
        self._writer = writer
        self._run_id = run_id
        self._segment_bytes = segment_bytes
        self._number = 0
        self._text_bytes = 0
        self._unwritten = b""
        self._ended = False
        self._events, self._chain = 0, ""
        self._compressor = compressor().compressobj()
        self._descriptor: int | None = None

    def path(self, number: int) -> Path:
        """Return the file of a segment."""
        return self.root / segment_key(self._writer, number)

    def append(self, lines: Sequence[bytes]) -> None:
        """Take a batch, which `write` then writes; nothing may be left to write before."""
        text = b"".join(lines)
        if not self._text_bytes:
            first = SegmentLine(format=FORMAT, run=self._run_id, writer=self._writer, n=self._number, chain=self._chain)
            text = msgspec.json.encode(first) + b"\n" + text
        self._events += len(lines)
        self._chain, line = chain_line(self._chain, self._events, text)
        self._text_bytes += len(text) + len(line)
        packed = self._compressor.compress(text + line)
        self._unwritten = packed + self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def write(self) -> None:
        """Give the kernel what was appended, and begin a new segment after a full one.

        Raise `StoreError` when the disk does not take it.
        """
        if self._text_bytes >= self._segment_bytes:
            self._end()
        try:
            while self._unwritten:
                written = os.write(self._open(), self._unwritten)
                self._unwritten = self._unwritten[written:]
                self.sizes[self._number] += written
        except OSError as error:
            msg = f"cannot write the ledger to {self.path(self._number)}: {explain(error)}"
            raise StoreError(msg) from error
        self.events, self.chain = self._events, self._chain
        if self._ended:
            self.release()
            self._ended = False
            self._number += 1
            self._compressor = compressor().compressobj()

    def end(self) -> None:
        """Write what is left, and end the open segment."""
        if self._text_bytes:
            self._end()
        self.write()

    def release(self) -> None:
        """Close the open file, whatever is left to write."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _end(self) -> None:
        self._unwritten += self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)
        self._text_bytes = 0
        self._ended = True

    def _open(self) -> int:
        if self._descriptor is None:
            path = self.path(self._number)
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, 0o644)
            self.sizes[self._number] = 0
        return self._descriptor
