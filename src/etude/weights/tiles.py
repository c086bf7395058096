"""Many tiles in a row: cut, coded and applied independently of each other, each with a hash before and one after.

u64 xxh3-64 of the table | table: u32 elements of a tile (the last one is shorter), then per tile
    u8 coding | u32 bytes | u64 xxh3-64 of these bytes | xxh3-128 of the new elements | the tiles' bytes, edge to edge

The hash of the new elements is zero in what was written where they could not be hashed. Readers then rely on the digest
of the tensor, without which no version is used.
"""

import struct
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from etude.errors import IntegrityError
from etude.weights.bits import require
from etude.weights.delta import MAX_TILE, Coding, read_tile, write_tile
from etude.weights.kernels import NO_DIGEST, Kernels, T
from etude.weights.ulp import Layout

_HASH = struct.Struct("<Q")
_SIZE = struct.Struct("<I")
_ROW = struct.Struct("<BIQ16s")
_SPARSE_TILE, _DENSE_TILE = MAX_TILE, 1 << 20
_SPARSE = 0.1
_SAMPLES, _SAMPLE = 64, 64
"""Runs, and elements in each, that tell how much changed."""
_Result = TypeVar("_Result")


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tile lies, and what it must be."""

    coding: Coding
    begin: int
    end: int
    """Elements of the whole."""
    blob: memoryview
    digest: bytes
    """xxh3-128 of the new elements, or `NO_DIGEST`."""


def write_tiles(
    old: T | None, new: T, *, layout: Layout, kernels: Kernels[T], context: bool, workers: int = 1
) -> bytes:
    """Return the tiles of all elements, from the old ones or, without these, standing alone."""
    size = tile_size_for(old, new, layout, kernels)

    def write(begin: int) -> tuple[bytes, bytes]:
        fresh = new[begin : begin + size]
        base = None if old is None else old[begin : begin + size]
        coding, blob = write_tile(base, fresh, layout=layout, kernels=kernels, context=context)
        row = _ROW.pack(coding, len(blob), xxhash.xxh3_64_intdigest(blob), kernels.digest(fresh))
        return row, blob

    written = _each(write, range(0, len(new), size), workers)
    table = _SIZE.pack(size) + b"".join(row for row, _ in written)
    return b"".join((_HASH.pack(xxhash.xxh3_64_intdigest(table)), table, *(blob for _, blob in written)))


def read_tiles(data: memoryview, size: int, *, allowed: Collection[Coding]) -> list[Tile]:
    """Return the tiles of `size` elements; raise `IntegrityError` when any byte of `data` is not as it was written."""
    require(len(data) >= _HASH.size + _SIZE.size, "it ends before its table")
    (tile_size,) = _SIZE.unpack_from(data, _HASH.size)
    require(0 < tile_size <= MAX_TILE, f"tiles of {tile_size} elements")
    begins = range(0, size, tile_size)
    end = _HASH.size + _SIZE.size + len(begins) * _ROW.size
    require(end <= len(data), f"it is too short for the table of {len(begins)} tiles")
    table = data[_HASH.size : end]
    require(_HASH.unpack_from(data)[0] == xxhash.xxh3_64_intdigest(table), "its table is damaged")
    tiles: list[Tile] = []
    for begin, (coding, length, blob_hash, digest) in zip(begins, _ROW.iter_unpack(table[_SIZE.size :]), strict=True):
        blob = data[end : end + length]
        end += length
        require(len(blob) == length, f"the tile at element {begin} is cut off")
        require(xxhash.xxh3_64_intdigest(blob) == blob_hash, f"the tile at element {begin} is damaged")
        require(coding in allowed, f"the tile at element {begin} has the coding {coding}, which does not belong here")
        tile_end = min(size, begin + tile_size)
        tiles.append(Tile(coding=Coding(coding), begin=begin, end=tile_end, blob=blob, digest=digest))
    require(end == len(data), "there are bytes behind its last tile")
    return tiles


def apply_tiles(tiles: Iterable[Tile], elements: T, *, layout: Layout, kernels: Kernels[T], workers: int = 1) -> None:
    """Change elements in place, from old to new.

    Raise `IntegrityError` when a tile is not what a writer makes or gives other elements than it was made for, which is
    what old elements that are not the right ones lead to. Elements are then partly changed: give it a copy.
    """

    def apply(tile: Tile) -> None:
        part = elements[tile.begin : tile.end]
        try:
            read_tile(part, tile.coding, tile.blob, layout=layout, kernels=kernels).apply(part, layout, kernels)
            if tile.digest != NO_DIGEST:
                # A wrong base shows here; the other checks hold for whatever comes out of a store.
                require(kernels.digest(part) in (tile.digest, NO_DIGEST), "it was made for other old weights")
        except IntegrityError as error:
            msg = f"the tile at element {tile.begin} cannot be applied: {error}"
            raise IntegrityError(msg) from error

    _each(apply, tiles, workers)


def tile_size_for(old: T | None, new: T, layout: Layout, kernels: Kernels[T]) -> int:
    """Tiles cost less per change the larger they are, and memory for every change."""
    if old is None or layout.width > 2 or not len(new):  # noqa: PLR2004 - bytes of a half-precision element
        return _DENSE_TILE
    begins = np.linspace(0, max(0, len(new) - _SAMPLE), _SAMPLES, dtype=np.int64)
    places = np.minimum(begins[:, None] + np.arange(_SAMPLE), len(new) - 1)
    changed = float((kernels.take(old, places) != kernels.take(new, places)).mean())
    return _SPARSE_TILE if changed < _SPARSE else _DENSE_TILE


def _each(function: Callable[..., _Result], arguments: Iterable[object], workers: int) -> list[_Result]:
    if workers == 1:
        return [function(argument) for argument in arguments]
    with ThreadPoolExecutor(workers, thread_name_prefix="tiles") as threads:
        return list(threads.map(function, arguments))
