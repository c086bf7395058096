"""Which elements of a block belong to which class: what the compiled loops count and look up.

A class is a number below 15, of four bits. Each bit of 64 elements is one word, so that a few operations on words
answer for 64 elements which of them are of a class, whatever the class; counting them over a block, the same
operations are done on several words at once.
"""

import numpy as np
from numpy.typing import NDArray

from etude.weights.lanes import LANES, add_up_lanes, at_most_lanes, class_lanes, count_ones
from etude.weights.ulp import Patterns

BLOCK = 1 << 14
"""Elements that are looked at together: what is known of them stays in the nearest cache."""
BITS = 4
HALVES = 2
STRETCH = HALVES * LANES
"""Elements between two counts that are kept."""
STRETCHES = BLOCK // STRETCH
NUMBERS = 1 << BITS
"""That a class may have. They are counted four at a time, whether or not elements have them."""
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Counts = NDArray[np.uint16]


def write_planes(tile: Patterns, begin: int, shift: int, lowest: int, highest: int, planes: Words) -> None:
    """Write the words of the classes of a block: `STRETCHES` for each bit and half, see `members_of`.

    Behind the last element is the class that is none.
    """
    element, size = tile.dtype.type, min(BLOCK, tile.size - begin)
    part = tile[begin : begin + size]
    if size < BLOCK:
        part = np.zeros(BLOCK, tile.dtype)
        part[:size] = tile[begin:]
    # Where an exponent stands once the sign is shifted out.
    place, raised = shift + 1, np.int64(max(-lowest, 0))
    lower, most = element(np.int64(max(lowest, 0)) << place), element((highest - raised) << place)
    for half in range(HALVES):
        for stretch in range(STRETCHES):
            at = stretch * STRETCH + half * LANES
            words = class_lanes(part, at, lower, most, element(raised << place), np.uint8(1 << (place & 7)))
            behind = _ALL << np.uint64(max(size - at, 0)) if size < at + LANES else np.uint64(0)
            for bit in range(BITS):
                planes[(bit * HALVES + half) * STRETCHES + stretch] = words[bit] | behind


def members_of(planes: Words, number: int, half: int, stretch: int) -> np.uint64:
    """Return a bit for each element of half a stretch: whether it is of the class."""
    found = _ALL
    for bit in range(BITS):
        found &= planes[(bit * HALVES + half) * STRETCHES + stretch] ^ (_ALL ^ (np.uint64((number >> bit) & 1) * _ALL))
    return found


def count_members(planes: Words, counts: Counts) -> None:
    """Write how many members each class has in each stretch, those of a class in a row."""
    for upper in range(NUMBERS // 4):
        count_four(planes, upper, counts)


def count_four(planes: Words, upper: int, counts: Counts) -> None:
    """Write counts of the four classes that have these upper bits, which compiles to wide instructions."""
    row = 4 * upper * STRETCHES
    for stretch in range(STRETCHES):
        first, second = members_of_four(planes, upper, 0, stretch), members_of_four(planes, upper, 1, stretch)
        for lower in range(4):
            counts[row + lower * STRETCHES + stretch] = np.uint16(count_ones(first[lower]) + count_ones(second[lower]))


def members_of_four(
    planes: Words, upper: int, half: int, stretch: int
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return what `members_of` does for four classes."""
    at = half * STRETCHES + stretch
    first, second = planes[at], planes[HALVES * STRETCHES + at]
    third = planes[2 * HALVES * STRETCHES + at] ^ (_ALL ^ (np.uint64(upper & 1) * _ALL))
    both = planes[3 * HALVES * STRETCHES + at] ^ (_ALL ^ (np.uint64(upper >> 1) * _ALL))
    both &= third
    return both & ~first & ~second, both & first & ~second, both & ~first & second, both & first & second


def add_up(counts: Counts, number: int) -> int:
    """Turn the counts of a class into how many of its members lie before each stretch; return how many it has."""
    total = np.uint16(0)
    for begin in range(0, STRETCHES, LANES):
        total = add_up_lanes(counts, number * STRETCHES + begin, total)
    return int(total)


def class_at(planes: Words, half: int, stretch: int, lane: int) -> int:
    """Return the class of an element."""
    found = 0
    for bit in range(BITS):
        found |= int((planes[(bit * HALVES + half) * STRETCHES + stretch] >> np.uint64(lane)) & np.uint64(1)) << bit
    return found


def stretch_with(before: Counts, number: int, rank: int) -> int:
    """Return the stretch that has the member of a class with this rank in the block; there must be one."""
    found = 0
    for begin in range(0, STRETCHES, LANES):
        found += count_ones(at_most_lanes(before, number * STRETCHES + begin, np.uint16(rank)))
    return found - 1
