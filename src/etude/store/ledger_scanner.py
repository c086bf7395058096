"""From the bytes of ledger segments to facts, trusting none of them.

A kill leaves a prefix of what was written: whole blocks of the zstd frame, then a part of one. Everything else is
damage. So that the two can be told apart, blocks are taken one by one: a block that is whole has to decompress, and its
text has to end with a chain line that checks.
"""

from collections.abc import Iterator
from typing import NoReturn

import msgspec
import zstandard

from etude.errors import IntegrityError
from etude.store.ledger_format import (
    CHAIN_PREFIX,
    CHECKSUM_BYTES,
    FRAME_HEADER,
    MAX_LINE_BYTES,
    MAX_SEGMENT_BYTES,
    SegmentLine,
    chain_line,
    check_format,
    decompressor,
    segment_key,
)
from etude.telemetry.events import AnyEvent

_HEADER = 3
"""Bytes before a block's content: bit 0 says that it is the last, bits 1 and 2 its kind, the others its size."""
_BLOCK_BYTES = 128 << 10
_RLE, _RESERVED = 1, 3
_CHAIN = b"\n" + CHAIN_PREFIX
_NO_FACT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class SegmentScanner:
    """Reads the segments of one writer in turn."""

    def __init__(self, run_id: str, writer: str) -> None:
        self.events = 0
        """Facts that checked."""
        self.chain = ""
        """Chain value after them."""
        self.ended = False
        """Whether the segment was read to an end that its writer gave it."""
        self._run_id = run_id
        self._writer = writer
        self._facts = msgspec.json.Decoder(AnyEvent)
        self._begin(0)

    def scan(self, data: bytes) -> Iterator[list[AnyEvent]]:
        """Yield the batches of the segment, of which `data` is all that there is now; again with more of it goes on.

        Raise `IntegrityError` or `ConfigError` at the first thing that does not check.
        """
        if not self._offset:
            if not data.startswith(FRAME_HEADER[: len(data)]):
                self._damaged("it does not begin like a segment")
            if len(data) < len(FRAME_HEADER):
                return
            self._offset = self._sound = len(FRAME_HEADER)
            self._zstd.decompress(FRAME_HEADER)
        while not self.ended and (end := self._block_end(data)):
            self._text += self._unpacked(data[self._offset : end])
            self._offset = end
            yield from self._batches()
        if self.ended and len(data) > self._offset:
            self._damaged(f"{len(data) - self._offset} bytes follow its end")

    def end_before_another(self) -> None:
        """Go on to the next segment; raise `IntegrityError` when this one has no proper end."""
        if not self.ended:
            self._damaged("it breaks off, but another segment follows")
        self._begin(self._number + 1)

    def torn_bytes(self, data: bytes) -> int:
        """Return the bytes after the last batch, as a kill may leave them; raise `IntegrityError` if it cannot."""
        if self._text and (len(self._text) < _BLOCK_BYTES or len(data) == self._offset):
            self._damaged("its last batch has no chain line")
        if self._is_edited(data):
            self._damaged("the size of a block was changed")
        return len(data) - self._sound

    def _begin(self, number: int) -> None:
        self.ended = False
        self._number = number
        self._zstd = decompressor().decompressobj()
        self._offset = 0
        self._sound = 0
        self._text_bytes = 0
        self._text = bytearray()
        self._searched = 0
        """Bytes of the text in which no chain line begins."""
        self._first_line = -1
        """Bytes of the first line, as long as it stands before the text; below 0 until it was checked."""

    def _block_end(self, data: bytes) -> int:
        """Return where the next block ends, 0 when that is not there."""
        start = self._offset
        if len(data) < start + _HEADER:
            return 0
        header = int.from_bytes(data[start : start + _HEADER], "little")
        if not header and not any(data[start:]):
            return 0  # a file that was made longer, but not written, before the power failed
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED or size > _BLOCK_BYTES or not (size or last):
            self._damaged("a block makes no sense")
        end = start + _HEADER + (1 if kind == _RLE else size) + last * CHECKSUM_BYTES
        return end if end <= len(data) else 0

    def _unpacked(self, block: bytes) -> bytes:
        try:
            text = self._zstd.decompress(block)
        except zstandard.ZstdError as error:
            self._damaged(str(error))
        self.ended = self._zstd.eof
        self._text_bytes += len(text)
        if self._text_bytes > MAX_SEGMENT_BYTES:
            self._damaged(f"it has more than {MAX_SEGMENT_BYTES} bytes of text")
        return text

    def _batches(self) -> Iterator[list[AnyEvent]]:
        """Take whole batches off the text."""
        if self._first_line < 0 and b"\n" in self._text:
            self._check_first_line()
        text, start = self._text, 0
        while (at := text.find(_CHAIN, self._searched) + 1) and (end := text.find(b"\n", at) + 1):
            yield self._batch(text[start:at], bytes(text[at:end]))
            start = self._searched = end
        self._searched = max(0, (at or len(text) - len(_CHAIN) + 1) - 1 - start)
        del text[:start]
        if not self._text:
            self._sound = self._offset
        elif len(self._text) > MAX_LINE_BYTES + _BLOCK_BYTES:
            self._damaged(f"a batch has more than {MAX_LINE_BYTES} bytes")
        elif self.ended:
            self._damaged("it ends within a batch")

    def _check_first_line(self) -> None:
        """Find out whose segment this is before its facts are judged."""
        line = self._text[: self._text.index(b"\n") + 1]
        try:
            first = msgspec.json.decode(line, type=SegmentLine)
        except _NO_FACT as error:
            self._damaged(f"its first line is none ({error})")
        check_format(first.format, self._place)
        if first.run != self._run_id:
            self._damaged(f"it belongs to another run, {first.run[:64]!r}")
        if (first.writer, first.n) != (self._writer, self._number):
            self._damaged(f"it is segment {first.n} of {first.writer[:200]!r}")
        if first.chain != self.chain:
            self._damaged("it does not continue the segment before")
        self._first_line = len(line)

    def _batch(self, text: bytearray, line: bytes) -> list[AnyEvent]:
        begins, self._first_line = self._first_line, 0
        lines = text[begins:]
        events = self.events + lines.count(b"\n")
        chain, expected = chain_line(self.chain, events, text)
        if line != expected:
            self._damaged("a chain line does not fit the facts before it")
        try:
            facts = self._facts.decode_lines(lines)
        except _NO_FACT as error:
            self._damaged(f"a line is no fact that this etude knows: {error}")
        if self.events + len(facts) != events or not facts:
            self._damaged("a line has not one fact")
        self.events, self.chain = events, chain
        return facts

    def _is_edited(self, data: bytes) -> bool:
        """Whether what seems to break off is a whole batch, but for one byte of its block's size.

        Without this, an edit of that byte near the end of a file would pass for a kill.
        """
        header = data[self._offset : self._offset + _HEADER]
        if len(header) < _HEADER or self._text:
            return False
        for place in range(_HEADER):
            for value in range(256):
                edited = header[:place] + bytes([value]) + header[place + 1 :]
                end = self._fitting_end(edited, len(data))
                if end and self._is_batch(data[: self._offset] + edited + data[self._offset + _HEADER : end]):
                    return True
        return False

    def _fitting_end(self, header: bytes, available: int) -> int:
        """Return where a block with this header ends, 0 if it does not fit."""
        number = int.from_bytes(header, "little")
        last, kind, size = number & 1, number >> 1 & 3, number >> 3
        end = self._offset + _HEADER + size
        return end if size and kind != _RESERVED and not last and end <= available else 0

    def _is_batch(self, data: bytes) -> bool:
        """Whether the last block of a segment decompresses to a batch that checks."""
        try:
            text = decompressor().decompressobj().decompress(data)[self._text_bytes :]
        except zstandard.ZstdError:
            return False
        at = text.find(_CHAIN) + 1
        events = self.events + text[:at].count(b"\n") - (self._first_line < 0)
        return bool(at) and text[at:] == chain_line(self.chain, events, text[:at])[1]

    @property
    def _place(self) -> str:
        return segment_key(self._writer, self._number)

    def _damaged(self, why: str) -> NoReturn:
        msg = (
            f"ledger {self._writer} is damaged in segment {self._number} after fact {self.events}: {why}; "
            f"restore {self._place} from a copy"
        )
        raise IntegrityError(msg)
