"""Many elements at once: what a processor's wide instructions answer with one bit for each of them.

These functions say what is meant. Where they are compiled, `instructions` puts in their place what does it.
"""

import numpy as np
from numpy.typing import NDArray

from etude.weights.ulp import Patterns

LANES = 64
"""Elements that are looked at together: a bit of a word for each."""


def bit_lanes(values: NDArray[np.uint8], begin: int, bit: np.uint8) -> np.uint64:
    """Return a bit for each of the `LANES` bytes from `begin`, the first one lowest: whether it has the bit set."""
    return _bits((values[begin : begin + LANES] & bit) != 0)


def at_most_lanes(values: NDArray[np.uint16], begin: int, most: np.uint16) -> np.uint64:
    """Return a bit for each of the `LANES` numbers from `begin`, the first one lowest: whether it is at most that."""
    return _bits(values[begin : begin + LANES] <= most)


def fetch_early(values: Patterns, begin: int) -> None:
    """Ask for the elements from `begin` to be fetched from memory; changes nothing."""


def differing_lanes(old: Patterns, new: Patterns, begin: int) -> np.uint64:
    """Return a bit for each of the `LANES` elements from `begin`, the first one lowest: whether they differ."""
    return _bits(old[begin : begin + LANES] != new[begin : begin + LANES])


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
