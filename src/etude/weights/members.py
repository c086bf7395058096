"""Which elements of a block belong to which class: what the compiled loops count and look up.

A class is a number below 15, of four bits. Each bit of 64 elements is one word, so that a few operations on words
answer for 64 elements which of them are of a class, whatever the class; counting them over a block, the same
operations are done on several words at once.
"""

import numpy as np
from numpy.typing import NDArray

from etude.weights.lanes import LANES, at_most_lanes, bit_lanes, count_ones
from etude.weights.ulp import Patterns

BLOCK = 1 << 14
"""Elements that are looked at together: what is known of them stays in the nearest cache."""
BITS = 4
HALVES = 2
STRETCH = HALVES * LANES
"""Elements between two counts that are kept."""
STRETCHES = BLOCK // STRETCH
_BFLOAT16_SHIFT = 7
_NO_CLASS = 255
"""Behind the last element of the last block: 15 in its low bits."""
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Counts = NDArray[np.uint16]


def write_classes(part: Patterns, shift: int, mask: int, lowest: int, highest: int, classes: Bytes) -> None:
    """Write the class of every element, and what is no class behind the last one."""
    element = part.dtype.type
    exponent = element(np.int64(mask) << shift)
    # Exponents stay where they are in the element until the end: numbers of more bits would halve the speed.
    lower, raised = element(np.int64(max(lowest, 0)) << shift), element(np.int64(max(-lowest, 0)) << shift)
    most = element((np.int64(highest) << shift) - raised)
    if shift == _BFLOAT16_SHIFT:  # a shift by a number that is known compiles to wide instructions
        for at in range(part.size):
            above = element(max(element(part[at] & exponent), lower) - lower)
            classes[at] = np.uint8(element(min(above, most) + raised) >> element(_BFLOAT16_SHIFT))
    else:
        for at in range(part.size):
            above = element(max(element(part[at] & exponent), lower) - lower)
            classes[at] = np.uint8(element(min(above, most) + raised) >> element(shift))
    classes[part.size :] = np.uint8(_NO_CLASS)


def write_planes(classes: Bytes, planes: Words) -> None:
    """Write the words of a block's classes: `STRETCHES` for each bit and half, see `members_of`."""
    for half in range(HALVES):
        for stretch in range(STRETCHES):
            at = stretch * STRETCH + half * LANES
            for bit in range(BITS):
                planes[(bit * HALVES + half) * STRETCHES + stretch] = bit_lanes(classes, at, np.uint8(1 << bit))


def members_of(planes: Words, number: int, half: int, stretch: int) -> np.uint64:
    """Return a bit for each element of half a stretch: whether it is of the class."""
    found = _ALL
    for bit in range(BITS):
        found &= planes[(bit * HALVES + half) * STRETCHES + stretch] ^ (_ALL ^ (np.uint64((number >> bit) & 1) * _ALL))
    return found


def count_members(planes: Words, number: int, counts: Words, before: Counts) -> int:
    """Write how many members of the class lie before each stretch, and before the end; return the last of these."""
    for stretch in range(STRETCHES):
        first, second = members_of(planes, number, 0, stretch), members_of(planes, number, 1, stretch)
        counts[stretch] = np.uint64(count_ones(first) + count_ones(second))
    # Apart from the above, which is done for several stretches at once.
    running = 0
    for stretch in range(STRETCHES):
        before[stretch] = np.uint16(running)
        running += int(counts[stretch])
    before[STRETCHES] = np.uint16(running)
    return running


def stretch_with(before: Counts, rank: int) -> int:
    """Return the stretch that has the member with this rank in the block; there must be one."""
    found = 0
    for begin in range(1, STRETCHES, LANES):
        found += count_ones(at_most_lanes(before, begin, np.uint16(rank)))
    return found
