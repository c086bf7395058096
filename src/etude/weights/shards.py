"""Where the tensors of a Hugging Face directory lie in its safetensors files."""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from etude.errors import IntegrityError
from etude.weights.tensors import DTYPES

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100 << 20
_MAX_INDEX = 64 << 20
_MAX_DIMENSIONS = 8
_CODES = {"F4": 2}
"""How many of safetensors' elements, which counts codes, are one of torch's, along the last dimension."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,150}\.safetensors")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's bytes in a file."""

    file: str
    at: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape."""


def find_places(folder: Path) -> dict[str, Place]:
    """Return every tensor of the directory by name; empty when it has no weights.

    Raise `IntegrityError` when its files contradict each other or themselves.
    """
    index = folder / INDEX
    if index.is_file():
        names = _files_of(index)
    else:
        names = ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    places: dict[str, Place] = {}
    for name in names:
        for tensor, place in _read_header(folder / name).items():
            if tensor in places:
                raise _refused(folder / name, f"tensor {tensor[:80]!r} is in {places[tensor].file} as well")
            places[tensor] = place
    return places


def divide(tensors: Sequence[Tensor], like: Mapping[str, str], *, shard_bytes: int = SHARD_BYTES) -> dict[str, str]:
    """Return the file for each tensor: as in `like` when that has the same names, else in order into few files."""
    if like and set(like) == {name for name, _, _ in tensors}:
        return dict(like)
    shards: list[list[str]] = [[]]
    held = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return dict.fromkeys(shards[0], "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, shard in enumerate(shards, start=1)
        for name in shard
    }


def header_of(tensors: Sequence[Tensor], file: str) -> tuple[bytes, dict[str, Place]]:
    """Return the first bytes of a safetensors file with these tensors, and where each of them goes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The widest first keeps every tensor aligned to its elements.
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor[1]].itemsize, tensor[0]))
    for name, dtype, shape in ordered:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": _in_file(dtype, shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    begin = _LENGTH.size + len(header)
    places: dict[str, Place] = {}
    for name, dtype, shape in ordered:
        places[name] = Place(file=file, at=begin, dtype=dtype, shape=shape)
        begin += places[name].size
    return _LENGTH.pack(len(header)) + header, places


def _in_file(dtype: str, shape: tuple[int, ...]) -> list[int]:
    """Return the shape that a header says."""
    codes = _CODES.get(dtype, 1)
    return [*shape[:-1], *(size * codes for size in shape[-1:])]


def index_of(places: Mapping[str, Place]) -> bytes:
    """Return `model.safetensors.index.json` for tensors that are in several files."""
    weight_map = {name: place.file for name, place in sorted(places.items())}
    total = sum(place.size for place in places.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"


def _files_of(index: Path) -> list[str]:
    if index.stat().st_size > _MAX_INDEX:
        raise _refused(index, f"it has more than {_MAX_INDEX} bytes")
    try:
        content = msgspec.json.decode(index.read_bytes(), type=dict[str, object])
        names = sorted(set(msgspec.convert(content.get("weight_map"), dict[str, str]).values()))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(index, str(error)) from error
    for name in names:
        if _FILE.fullmatch(name) is None or (index.parent / name).is_symlink():
            raise _refused(index, f"{name[:80]!r} is not a plain safetensors file beside it")
    return names


def _read_header(file: Path) -> dict[str, Place]:
    if not file.is_file() or file.is_symlink():
        raise _refused(file, "it is not a file")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > min(_MAX_HEADER, size - _LENGTH.size):
            raise _refused(file, "it has no header")
        header = opened.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, dict[str, object]])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(file, str(error)) from error
    entries.pop("__metadata__", None)
    return {name: _place(file, name, entry, _LENGTH.size + length, size) for name, entry in entries.items()}


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _place(file: Path, name: str, entry: Mapping[str, object], begin: int, size: int) -> Place:
    try:
        found = msgspec.convert(cast("object", entry), _Entry)
    except msgspec.ValidationError as error:
        raise _refused(file, f"tensor {name[:80]!r}: {error}") from error
    known = found.dtype in DTYPES and len(found.shape) <= _MAX_DIMENSIONS and min(found.shape, default=0) >= 0
    if not known:
        raise _refused(file, f"tensor {name[:80]!r} has dtype {found.dtype[:20]!r} and shape {found.shape}")
    codes = _CODES.get(found.dtype, 1)
    shape = (*found.shape[:-1], *(size // codes for size in found.shape[-1:]))
    place = Place(file=file.name, at=begin + found.data_offsets[0], dtype=found.dtype, shape=shape)
    start, end = found.data_offsets
    if not (0 <= start <= end <= size - begin and end - start == place.size):
        raise _refused(file, f"tensor {name[:80]!r} does not lie where its header says")
    return place


def _refused(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{path} is refused: {what}; copy the model again, or start from an empty directory")
