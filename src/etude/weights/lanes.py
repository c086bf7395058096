"""Many elements at once: what a processor's wide instructions answer with one bit for each of them.

These functions say what is meant. Where they are compiled, `instructions` puts in their place what does it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.weights.ulp import Patterns

Element = np.unsignedinteger[Any]
"""One of `Patterns`."""

LANES = 64
"""Elements that are looked at together: a bit of a word for each."""


def class_lanes(
    values: Patterns, begin: int, lower: Element, most: Element, raised: Element, bit: np.uint8
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return a bit for each of the `LANES` elements from `begin`, four times: the lowest to highest bit of its class.

    The class is the exponent less `lower`, not below 0 nor above `most`, plus `raised`: three numbers shifted to where
    exponents are once the sign is shifted out. `bit` is the lowest one of a class in an element's highest byte.
    """
    found = values[begin : begin + LANES] << values.dtype.type(1)
    found = np.minimum(np.maximum(found, lower) - lower, most) + raised
    high = (found >> values.dtype.type(8 * values.itemsize - 8)).astype(np.uint8)
    first, second, third, fourth = (_bits((high & (bit << place)) != 0) for place in range(4))
    return first, second, third, fourth


def add_up_lanes(values: NDArray[np.uint16], begin: int, first: np.uint16) -> np.uint16:
    """Replace each of the `LANES` numbers from `begin` by `first` and all before it; return the sum of all."""
    sums = first + np.cumsum(values[begin : begin + LANES], dtype=np.uint16)
    values[begin + 1 : begin + LANES] = sums[:-1]
    values[begin] = first
    return sums[-1]


def at_most_lanes(values: NDArray[np.uint16], begin: int, most: np.uint16) -> np.uint64:
    """Return a bit for each of the `LANES` numbers from `begin`, the first one lowest: whether it is at most that."""
    return _bits(values[begin : begin + LANES] <= most)


def fetch_early(values: Patterns, begin: int) -> None:
    """Ask for the elements from `begin` to be fetched from memory; changes nothing."""


def differing_lanes(old: Patterns, new: Patterns, begin: int) -> np.uint64:
    """Return a bit for each of the `LANES` elements from `begin`, the first one lowest: whether they differ."""
    return _bits(old[begin : begin + LANES] != new[begin : begin + LANES])


def bits_from(data: NDArray[np.uint8], begin: int) -> np.uint64:
    """Return the bits of the eight bytes from `begin`, each byte's from its highest down, the first one lowest."""
    return _bits(np.unpackbits(data[begin : begin + 8]) != 0)


def count_ones(bits: np.uint64) -> int:
    """Return how many bits are set."""
    return int(bits).bit_count()


def first_one(bits: np.uint64) -> int:
    """Return the place of the lowest bit that is set; there must be one."""
    return (int(bits) & -int(bits)).bit_length() - 1


def nth_one(bits: np.uint64, ones_before: int) -> int:
    """Return the place of the bit that is set and has so many others below; there must be one."""
    place = 0
    for width in (32, 16, 8, 4, 2, 1):
        here = count_ones(bits & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
        above = int(ones_before >= here)  # no branch: nobody could foresee it
        ones_before -= here * above
        bits >>= np.uint64(width * above)
        place += width * above
    return place


def _bits(holds: NDArray[np.bool_]) -> np.uint64:
    return np.packbits(holds, bitorder="little").view("<u8")[0]
