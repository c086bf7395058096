"""What is about to happen to the files of a directory, on disk before the first of them changes.

Whatever is written here is absolute (new elements at their places, files to put in place), so doing it twice is doing
it once: after a crash the whole journal is simply carried out again.

u32 length | JSON header | payload, for each record; an `End` record; xxh3-128 of all of it.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.errors import IntegrityError
from etude.weights.disk import Disk

_CHUNK = 1 << 20
"""Elements that are read, changed and written at once."""
_BUFFER = 8 << 20
_LENGTH = struct.Struct("<I")
_HASH_BYTES = 16
_MAX_HEADER = 4 << 20
_FILE = re.compile(r"(?!\.\.?$)[^/\0]{1,255}", re.DOTALL)
"""A name within a directory, by whomever it was given: files of others are removed by theirs."""
Elements = NDArray[np.unsignedinteger[Any]]


class Changed(msgspec.Struct, frozen=True, kw_only=True, tag="changed"):
    """Elements of a file that get new values."""

    file: str
    at: int
    """Byte at which the elements begin."""
    width: int
    """Bytes of one element."""
    count: int
    """Elements from there on that the record speaks of."""
    changes: int
    """How many of them change: their values are the end of the payload."""
    mask: bool
    """They are named by a bit for each element, and not by a u32 for each change."""

    @property
    def place_bytes(self) -> int:
        """Bytes before the values."""
        return (self.count + 7) // 8 if self.mask else 4 * self.changes


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag="moved"):
    """A file that was written beside and comes into place."""

    file: str


class Removed(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """A file that is no part of the new version."""

    file: str


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """What the directory is when all of that has happened."""

    state: msgspec.Raw
    files: dict[str, int]
    """Sizes of the files that change in place: others than these are not the ones that the journal is about."""


Record = Changed | Moved | Removed | End


class JournalWriter:
    """Collects what is to happen; nothing of it counts before `commit`."""

    def __init__(self, disk: Disk, path: Path) -> None:
        """Write beside `path`, over what an earlier attempt left there."""
        self._disk = disk
        self._path = path
        self._staged = path.with_name(f"{path.name}.new")
        self._files: dict[str, int] = {}
        self._hash = xxhash.xxh3_128()
        self._buffer = bytearray()
        self._written = 0
        disk.remove(self._staged)

    def change(self, file: Path, at: int, positions: NDArray[np.int64], values: Elements) -> None:
        """Add new values for elements of `file`; `positions` rise and count in elements from the byte `at`."""
        self._files[file.name] = file.stat().st_size
        width = values.itemsize
        first = int(positions[0]) // _CHUNK if positions.size else 0
        last = int(positions[-1]) // _CHUNK + 1 if positions.size else 0
        bounds = np.searchsorted(positions, np.arange(first, last + 1) * _CHUNK)
        for chunk, begin, end in zip(range(first, last), bounds[:-1], bounds[1:], strict=True):
            if begin == end:
                continue
            places = positions[begin:end] - chunk * _CHUNK
            count = int(places[-1]) + 1
            mask = (count + 7) // 8 < 4 * places.size
            self._add(
                Changed(
                    file=file.name,
                    at=at + chunk * _CHUNK * width,
                    width=width,
                    count=count,
                    changes=places.size,
                    mask=mask,
                ),
                _mask(places, count) if mask else places.astype("<u4").tobytes(),
                values[begin:end].tobytes(),
            )

    def move(self, file: str) -> None:
        """Add a file that lies beside the journal and comes into place."""
        self._add(Moved(file=file))

    def remove(self, file: str) -> None:
        """Add a file that goes away."""
        self._add(Removed(file=file))

    def commit(self, state: msgspec.Struct) -> None:
        """Make the journal count, with what the directory says of itself afterwards."""
        self._add(End(state=msgspec.Raw(msgspec.json.encode(state)), files=self._files))
        self._buffer += self._hash.digest()
        self._flush()
        self._disk.sync(self._staged)
        self._disk.replace(self._staged, self._path)

    def _add(self, record: Record, *payload: bytes) -> None:
        header = msgspec.json.encode(record)
        for part in (_LENGTH.pack(len(header)), header, *payload):
            self._hash.update(part)
            self._buffer += part
        if len(self._buffer) > _BUFFER:
            self._flush()

    def _flush(self) -> None:
        self._disk.write(self._staged, bytes(self._buffer), at=self._written)
        self._written += len(self._buffer)
        self._buffer.clear()


def read_end(path: Path) -> End | None:
    """Return how a journal ends, or None when there is none.

    Raise `IntegrityError` when it is not whole, which no crash does: it is in place only once it is on the device.
    """
    try:
        with path.open("rb") as opened:
            _check_hash(opened, path)
            opened.seek(0)
            for record, _ in _records(opened, path):
                if isinstance(record, End):
                    return record
    except FileNotFoundError:
        return None
    raise _damaged(path)


def replay(disk: Disk, path: Path, folder: Path) -> None:
    """Do to the files of `folder` what the journal says, once more if it was done in part; all is lasting on return.

    Raise `IntegrityError` when they are not the files that it was written for.
    """
    end = read_end(path)
    assert end is not None
    for name, size in end.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            msg = f"{path} is about a file {file} of {size} bytes, which is not there; load the directory anew"
            raise IntegrityError(msg)
    with path.open("rb") as opened:
        for record, payload in _records(opened, path):
            match record:
                case Changed():
                    _change(disk, folder / record.file, record, payload)
                case Moved():
                    if (path.parent / record.file).exists():
                        disk.replace(path.parent / record.file, folder / record.file)
                case Removed():
                    disk.remove(folder / record.file)
                case End():
                    break
    for name in end.files:
        disk.sync(folder / name)
    disk.sync(folder)


def _change(disk: Disk, file: Path, record: Changed, payload: bytes) -> None:
    places: NDArray[Any]
    if record.mask:
        bits = np.frombuffer(payload, np.uint8, count=record.place_bytes)
        places = np.flatnonzero(np.unpackbits(bits, count=record.count))
    else:
        places = np.frombuffer(payload, "<u4", count=record.changes)
    size = record.count * record.width
    with file.open("rb") as opened:
        opened.seek(record.at)
        elements = np.frombuffer(bytearray(opened.read(size)), f"<u{record.width}")
    elements[places] = np.frombuffer(payload, f"<u{record.width}", offset=record.place_bytes)
    disk.write(file, elements.data.cast("B"), at=record.at)


def _mask(places: NDArray[np.int64], count: int) -> bytes:
    bits = np.zeros(count, np.uint8)
    bits[places] = 1
    return np.packbits(bits).tobytes()


def _records(opened: BinaryIO, path: Path) -> Iterator[tuple[Record, bytes]]:
    while True:
        (length,) = _LENGTH.unpack(_exactly(opened, _LENGTH.size, path))
        if length > _MAX_HEADER:
            raise _damaged(path)
        try:
            record = msgspec.json.decode(_exactly(opened, length, path), type=Record)
        except msgspec.DecodeError as error:
            raise _damaged(path) from error
        if not isinstance(record, End) and _FILE.fullmatch(record.file) is None:
            raise _damaged(path)
        size = 0
        if isinstance(record, Changed):
            size = record.place_bytes + record.changes * record.width
        yield record, _exactly(opened, size, path)
        if isinstance(record, End):
            return


def _check_hash(opened: BinaryIO, path: Path) -> None:
    found = xxhash.xxh3_128()
    left = path.stat().st_size - _HASH_BYTES
    while left > 0:
        part = _exactly(opened, min(left, _BUFFER), path)
        found.update(part)
        left -= len(part)
    if opened.read(_HASH_BYTES + 1) != found.digest():
        raise _damaged(path)


def _exactly(opened: BinaryIO, size: int, path: Path) -> bytes:
    data = opened.read(size)
    if len(data) != size:
        raise _damaged(path)
    return data


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(f"{path} is damaged; load the directory anew")
