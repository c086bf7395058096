"""Changes coded by the exponent that each weight has before them, which the reader has too, so that it costs nothing.

The smaller a weight, the shorter its steps in the last place and the more often it changes. Ranks within the class of
an exponent are therefore far more regular than positions in the tile. One class is a code without context.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from etude.weights.bits import (
    bit_string,
    compress,
    decompress,
    join,
    read_bit_string,
    require,
    split,
)
from etude.weights.kernels import Classes, Indices, Kernels
from etude.weights.rice import read_gaps, write_gaps
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
_CLASS_HEADER = struct.Struct("<BI")


class _OneClass:
    """All elements, in their order."""

    def __init__(self, size: int) -> None:
        self.members: Indices = np.array([size])

    def ranks(self, positions: Indices) -> tuple[NDArray[np.uint8], Indices]:
        return np.zeros(positions.size, np.uint8), positions

    def positions(self, which: int, ranks: Indices) -> Indices:
        del which
        return ranks


def write_changes(
    tile: Patterns, positions: Indices, distances: Patterns, *, count: int, layout: Layout, kernels: Kernels
) -> bytes:
    """Return what changed in a tile, given its old elements, by `count` classes."""
    top = _top_exponent(tile, layout, kernels) if count > 1 else 0
    classes = _classes(tile, top, count, layout, kernels)
    numbers, ranks = classes.ranks(positions)
    members, changed = classes.members, np.bincount(numbers, minlength=count)
    if count > 1:
        ranks, distances = _sorted(numbers, ranks, distances)
    del classes, numbers  # as large as the tile; what follows takes memory for every change
    headers, bodies = [struct.pack("<B", top)], list[bytes]()
    as_tokens = np.zeros(distances.size, np.bool_)
    begin = 0
    for size, number in zip(members.tolist(), changed.tolist(), strict=True):
        end = begin + number
        mode, body = _write_positions(ranks[begin:end], size, kernels)
        if number and float((magnitudes(distances[begin:end], layout) > 1).mean()) > _FAR:
            mode |= _TOKENS
            as_tokens[begin:end] = True
        headers.append(_CLASS_HEADER.pack(mode, len(body)))
        bodies.append(body)
        begin = end
    del ranks
    signs = write_signs(distances[~as_tokens], layout, kernels)
    tokens = write_tokens(distances[as_tokens], layout, kernels)
    return join([b"".join(headers), b"".join(bodies), *signs, *tokens])


def _sorted(numbers: NDArray[np.uint8], ranks: Indices, distances: Patterns) -> tuple[Indices, Patterns]:
    order = np.argsort(numbers, kind="stable")
    return ranks[order], distances[order]


def read_changes(
    tile: Patterns, blob: memoryview, *, count: int, layout: Layout, kernels: Kernels
) -> tuple[Indices, Patterns]:
    """Return positions and distances of what changed; only the exact old elements lead to the right ones."""
    header, bodies, *streams = split(blob, 2 + SIGN_PARTS + TOKEN_PARTS)
    require(len(header) == 1 + count * _CLASS_HEADER.size, "a header of another number of classes")
    require(header[0] < 1 << layout.exponent_bits, "an exponent that the dtype does not have")
    classes = _classes(tile, header[0], count, layout, kernels)
    by_form: tuple[list[Indices], list[Indices]] = ([], [])
    begin = 0
    for number, (mode, length) in enumerate(_CLASS_HEADER.iter_unpack(header[1:])):
        require(begin + length <= len(bodies), "the bodies of the classes are shorter than their header says")
        members = int(classes.members[number])
        if mode == _UNCHANGED:
            require(length == 0, "an unchanged class has a body")
            continue
        require((mode & ~_TOKENS) in (_GAPS, _BITMAP, _COMPRESSED_BITMAP), f"mode {mode} of a class is unknown")
        ranks = _read_positions(mode & ~_TOKENS, bodies[begin : begin + length], members, kernels)
        require(bool(ranks.size), "a class without changes is not marked as one")
        by_form[bool(mode & _TOKENS)].append(classes.positions(number, ranks))
        begin += length
    require(begin == len(bodies), "the bodies of the classes are longer than their header says")
    empty = np.zeros(0, np.int64)
    near, far = (np.concatenate([empty, *found]) for found in by_form)
    signs = read_signs(streams[:SIGN_PARTS], near.size, layout, kernels)
    tokens = read_tokens(streams[SIGN_PARTS:], far.size, layout, kernels)
    return np.concatenate((near, far)), np.concatenate((signs, tokens))


def _classes(tile: Patterns, top: int, count: int, layout: Layout, kernels: Kernels) -> Classes:
    return kernels.classes(tile, top - count + 1, count, layout) if count > 1 else _OneClass(tile.size)


def _top_exponent(tile: Patterns, layout: Layout, kernels: Kernels) -> int:
    """Return the smallest exponent that nearly all elements of a sample do not exceed."""
    covered = np.cumsum(kernels.exponents(tile, _EVERY, layout))
    return int(np.searchsorted(covered, _COVERED * float(covered[-1])))


def _write_positions(ranks: Indices, members: int, kernels: Kernels) -> tuple[int, bytes]:
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


def _read_positions(mode: int, body: memoryview, members: int, kernels: Kernels) -> Indices:
    if mode == _GAPS:
        return read_gaps(body, members, kernels)
    if mode == _COMPRESSED_BITMAP:
        body = memoryview(decompress(body, (members + 7) // 8))
    return np.flatnonzero(np.unpackbits(read_bit_string(body, members), count=members))
