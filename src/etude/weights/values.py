"""How far changed elements moved, in one of two forms: signs with exceptions, or tokens with extra bits.

Nearly every change of a large weight is one step, so a sign says it all. Small weights move by any distance; there, a
token for the magnitude compresses, and the bits below the leading one do not.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.weights.bits import (
    bit_string,
    optionally_compressed,
    read_bit_string,
    read_optionally_compressed,
    require,
)
from etude.weights.kernels import Kernels
from etude.weights.rice import read_gaps, write_gaps
from etude.weights.ulp import Layout, Patterns, is_negative, magnitudes

SIGN_PARTS = 4
TOKEN_PARTS = 2
_ESCAPE = 255
_NAMED = 32
"""Distances with a token of their own, counted as 1, -1, 2, -2, ...; the others share one with their binary order."""
_FIRST_ORDER = 5
_CHUNK = 1 << 16
"""Elements whose logarithms are taken at a time, so that their float64 stay small."""
_BYTE = np.dtype(np.uint8)


def write_signs(distances: Patterns, layout: Layout, kernels: Kernels[Any]) -> list[bytes]:
    """Return signs, and what is not one step: its gaps, magnitudes, and magnitudes too large for a byte."""
    one = layout.unsigned.type(1)
    exceptions = np.flatnonzero((distances != one) & (distances + one != 0))
    beyond = magnitudes(distances[exceptions], layout) - layout.unsigned.type(2)
    short = np.minimum(beyond, _ESCAPE).astype(np.uint8)
    long = beyond[short == _ESCAPE].astype(_escape_type(layout))
    return [
        bit_string(~is_negative(distances, layout)),
        write_gaps(exceptions, kernels),
        optionally_compressed(short, above=64),
        optionally_compressed(long, above=32),
    ]


def read_signs(parts: list[memoryview], count: int, layout: Layout, kernels: Kernels[Any]) -> Patterns:
    """Return `count` distances."""
    signs, gaps, shorts, longs = parts
    distances = kernels.unit_steps(read_bit_string(signs, count), count, layout)
    exceptions = read_gaps(gaps, count, kernels)
    beyond = read_optionally_compressed(shorts, exceptions.size, _BYTE).astype(np.uint64)
    escaped = np.flatnonzero(beyond == _ESCAPE)
    if layout.width > 1:
        long = read_optionally_compressed(longs, escaped.size, _escape_type(layout))
        require(bool((long >= _ESCAPE).all()), "an escaped distance would not have needed it")
        beyond[escaped] = long
    else:
        require(bytes(longs) == b"\0", "a byte cannot move further than a byte says")
    farthest = (1 << (layout.bits - 1)) - 2
    require(not beyond.size or int(beyond.max()) <= farthest, "a distance is larger than any")
    distances[exceptions] *= (beyond + np.uint64(2)).astype(layout.unsigned)
    return distances


def write_tokens(distances: Patterns, layout: Layout, kernels: Kernels[Any]) -> list[bytes]:
    """Return a token for each distance, and the bits that the tokens of far ones leave open, order by order."""
    zigzag: Patterns = np.bitwise_xor(distances << 1, np.negative(distances >> (layout.bits - 1)))
    tokens = (zigzag - layout.unsigned.type(1)).astype(np.uint8)
    far = np.flatnonzero(zigzag > _NAMED)
    values = zigzag[far]
    orders = _binary_orders(values)
    tokens[far] = orders + np.uint8(_NAMED)
    extra = [kernels.write_low_bits(values[chosen], order) for order, chosen in _by_order(orders)]
    return [optionally_compressed(tokens, above=64), b"".join(extra)]


def read_tokens(parts: list[memoryview], count: int, layout: Layout, kernels: Kernels[Any]) -> Patterns:
    """Return `count` distances."""
    tokens = read_optionally_compressed(parts[0], count, _BYTE)
    extra = np.frombuffer(parts[1], np.uint8)
    zigzag = tokens.astype(layout.unsigned) + layout.unsigned.type(1)
    far = np.flatnonzero(tokens >= _NAMED)
    orders = tokens[far] - np.uint8(_NAMED)
    in_range = (orders >= _FIRST_ORDER) & (orders < layout.bits)
    require(bool(in_range.all()), "a token names no distance")
    begin = 0
    for order, chosen in _by_order(orders):
        members = far[chosen]
        end = begin + (members.size * order + 7) // 8
        require(end <= extra.size, "extra bits are missing")
        low = kernels.read_low_bits(extra[begin:end], members.size, order)
        zigzag[members] = low | np.uint64(1 << order)
        begin = end
    require(begin == extra.size, "extra bits are left over")
    return np.bitwise_xor(zigzag >> 1, np.negative(zigzag & layout.unsigned.type(1)))


def _by_order(orders: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield every order that occurs, ascending, with the places where it does."""
    sorted_places = np.argsort(orders, kind="stable")
    begin = 0
    for order, count in enumerate(np.bincount(orders).tolist()):
        if count:
            yield order, sorted_places[begin : begin + count]
        begin += count


def _escape_type(layout: Layout) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{max(2, layout.width)}")


def _binary_orders(values: Patterns) -> NDArray[np.uint8]:
    """Return floor(log2) of numbers above zero."""
    orders = np.empty(values.size, np.uint8)
    for begin in range(0, values.size, _CHUNK):
        chunk = values[begin : begin + _CHUNK]
        # The exponent of a float64, which has 11 bits above the other 52.
        found = ((chunk.astype(np.float64).view(np.uint64) >> 52) - 1023).astype(np.uint8)
        # A float64 rounds 2^63 - 1 up to the next order.
        orders[begin : begin + _CHUNK] = found - ((chunk >> found.astype(chunk.dtype)) == 0).astype(np.uint8)
    return orders
