"""Changes coded by the exponent that each weight has before them, which the reader has too, so that it costs nothing.

The smaller a weight, the shorter its steps in the last place and the more often it changes. Ranks within the class of
an exponent are therefore far more regular than positions in the tile. One class is a code without context.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import IntegrityError
from etude.weights.bits import (
    bit_string,
    compress,
    decompress,
    frame_size,
    join,
    require,
    split,
)
from etude.weights.kernels import Indices, Kernels, T
from etude.weights.rice import read_gap_lists, write_gaps
from etude.weights.ulp import Layout, Patterns, magnitudes
from etude.weights.values import SIGN_PARTS, TOKEN_PARTS, read_signs, read_tokens, write_signs, write_tokens

CLASSES = 14
_GAPS, _BITMAP, _COMPRESSED_BITMAP, _UNCHANGED = range(4)
_TOKENS = 8
"""Added to the mode of a class whose distances are tokens."""
_SPARSE, _DENSE = 0.28, 0.5
"""Shares of a class between which gaps and bitmaps are both tried."""
_FAR = 0.06
"""Share of distances above one step from which on tokens are shorter than signs with exceptions."""
_COVERED = 0.999
_EVERY = 16
"""Elements of which one is a sample in a small tile."""
_RUNS, _RUN = 256, 64
"""Samples of a large tile, in runs, because elements far apart take a fetch from memory each."""
_CLASS_HEADER = struct.Struct("<BI")
_TOO_FEW = "more elements of an exponent changed than there are"


def write_changes(
    tile: T, positions: Indices, distances: Patterns, *, count: int, layout: Layout, kernels: Kernels[T]
) -> bytes:
    """Return what changed in a tile, given its old elements, by `count` classes."""
    top = _top_exponent(tile, layout, kernels) if count > 1 else 0
    if count > 1:
        numbers, ranks, members = kernels.ranks(tile, positions, top - count + 1, count, layout)
        changed = np.bincount(numbers, minlength=count)
        order = np.argsort(numbers, kind="stable")
        ranks, distances = ranks[order], distances[order]
        del numbers, order
    else:
        ranks, members, changed = positions, np.array([len(tile)]), np.array([positions.size])
    headers, bodies = [struct.pack("<B", top)], list[bytes]()
    is_far, as_tokens = magnitudes(distances, layout) > 1, np.zeros(distances.size, np.bool_)
    begin = 0
    for size, number in zip(members.tolist(), changed.tolist(), strict=True):
        end = begin + number
        mode, body = _write_positions(ranks[begin:end], size, kernels)
        if np.count_nonzero(is_far[begin:end]) > _FAR * number:
            mode |= _TOKENS
            as_tokens[begin:end] = True
        headers.append(_CLASS_HEADER.pack(mode, len(body)))
        bodies.append(body)
        begin = end
    del ranks, is_far
    signs = write_signs(distances[~as_tokens], layout, kernels)
    tokens = write_tokens(distances[as_tokens], layout, kernels)
    return join([b"".join(headers), b"".join(bodies), *signs, *tokens])


def read_changes(
    tile: T, blob: memoryview, *, count: int, layout: Layout, kernels: Kernels[T]
) -> tuple[Indices, Patterns]:
    """Return positions and distances of what changed; only the exact old elements lead to the right ones."""
    header, bodies, *streams = split(blob, 2 + SIGN_PARTS + TOKEN_PARTS)
    require(len(header) == 1 + count * _CLASS_HEADER.size, "a header of another number of classes")
    require(header[0] < 1 << layout.exponent_bits, "an exponent that the dtype does not have")
    ranks, bitmaps, as_tokens = _read_classes(header[1:], bodies, len(tile), kernels)
    far = np.repeat(as_tokens, [part.size for part in ranks])
    num_far = int(far.sum())
    signs = read_signs(streams[:SIGN_PARTS], far.size - num_far, layout, kernels)
    tokens = read_tokens(streams[SIGN_PARTS:], num_far, layout, kernels)
    placed = (ranks[0], np.array([len(tile)]))
    if count > 1:
        placed = kernels.positions(tile, ranks, header[0] - count + 1, layout)
    if placed is None:
        raise IntegrityError(_TOO_FEW)
    positions, members = placed
    for number, num_bytes in bitmaps.items():
        require((int(members[number]) + 7) // 8 == num_bytes, "a bitmap of another size than its class")
    return np.concatenate((positions[~far], positions[far])), np.concatenate((signs, tokens))


def _read_classes(
    headers: memoryview, bodies: memoryview, size: int, kernels: Kernels[Any]
) -> tuple[list[Indices], dict[int, int], list[bool]]:
    """Return the ranks of every class, the bytes of those that are bitmaps, and which distances are tokens.

    How many members a class has is not known yet, but all classes together have as many as the tile. So memory is
    bounded by the tile's size.
    """
    ranks, bitmaps, as_tokens, gaps = dict[int, Indices](), dict[int, int](), list[bool](), dict[int, memoryview]()
    begin = 0
    for number, (mode, length) in enumerate(_CLASS_HEADER.iter_unpack(headers)):
        body = bodies[begin : begin + length]
        begin += length
        require(len(body) == length, "the bodies of the classes are shorter than their header says")
        as_tokens.append(mode != _UNCHANGED and bool(mode & _TOKENS))
        if mode == _UNCHANGED:
            require(length == 0, "an unchanged class has a body")
            ranks[number] = np.zeros(0, np.int64)
        elif mode & ~_TOKENS == _GAPS:
            gaps[number] = body
        else:
            bitmap = _read_bitmap(mode & ~_TOKENS, body, size)
            bitmaps[number], ranks[number] = bitmap.size, np.flatnonzero(np.unpackbits(bitmap))
            size = _without(size, ranks[number])
    require(begin == len(bodies), "the bodies of the classes are longer than their header says")
    ranks.update(zip(gaps, read_gap_lists(list(gaps.values()), size, kernels), strict=True))
    for number in gaps:
        size = _without(size, ranks[number])
    return [ranks[number] for number in range(len(as_tokens))], bitmaps, as_tokens


def _without(size: int, ranks: Indices) -> int:
    """Return how many members are left for other classes."""
    require(bool(ranks.size), "a class without changes is not marked as one")
    size -= int(ranks[-1]) + 1
    require(size >= 0, _TOO_FEW)
    return size


def _top_exponent(tile: T, layout: Layout, kernels: Kernels[T]) -> int:
    """Return the smallest exponent that nearly all elements of a sample do not exceed."""
    size, stride = len(tile), len(tile) // (_RUNS * _RUN)
    sample = tile[::_EVERY] if stride < _EVERY else tile[: size - size % _RUN].reshape(-1, _RUN)[::stride]
    exponents = (kernels.fetch(sample).ravel() >> layout.mantissa_bits) & ((1 << layout.exponent_bits) - 1)
    covered = np.cumsum(np.bincount(exponents.astype(np.int64), minlength=1 << layout.exponent_bits))
    return int(np.searchsorted(covered, _COVERED * float(covered[-1])))


def _write_positions(ranks: Indices, members: int, kernels: Kernels[Any]) -> tuple[int, bytes]:
    if not ranks.size:
        return _UNCHANGED, b""
    if ranks.size <= _SPARSE * members:
        return _GAPS, write_gaps(ranks, kernels)
    bits = np.zeros(members, np.bool_)
    bits[ranks] = True
    plain = bit_string(bits)
    candidates = [(_BITMAP, plain), (_COMPRESSED_BITMAP, compress(np.frombuffer(plain, np.uint8)))]
    if ranks.size <= _DENSE * members:
        candidates.append((_GAPS, write_gaps(ranks, kernels)))
    return min(candidates, key=lambda found: len(found[1]))


def _read_bitmap(mode: int, body: memoryview, most: int) -> NDArray[np.uint8]:
    """Return a class's bitmap, of at most so many members."""
    require(mode in (_BITMAP, _COMPRESSED_BITMAP), f"mode {mode} of a class is unknown")
    num_bytes = frame_size(body) if mode == _COMPRESSED_BITMAP else len(body)
    require(num_bytes <= (most + 7) // 8, f"a bitmap of {num_bytes} bytes for at most {most} members")
    return np.frombuffer(decompress(body, num_bytes) if mode == _COMPRESSED_BITMAP else body, np.uint8)
