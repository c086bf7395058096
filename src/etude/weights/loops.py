"""The inner loops that numba compiles: plain numbers and arrays, nothing else.

Loops that count compile to wide instructions: their lengths are fixed, nothing branches, sums are single bytes.
"""

import numpy as np
from numpy.typing import NDArray

from etude.weights.kernels import Indices
from etude.weights.ulp import Patterns

BLOCK = 128
"""Elements whose classes are counted together; a count fits a byte."""
_LANES = 64
"""Elements that are compared at once where the processor can; their count is then one instruction."""
STRIDE = 8
"""Blocks between two running totals."""
_CACHED = 256
"""Blocks whose classes stay in the nearest cache while they are counted."""
_WORDS_COMPARED = 16
"""Words of eight bytes that are compared together."""
NO_CLASS = 255
"""Behind the last element, so that every block is whole."""
_ONES = np.uint64(0x0101_0101_0101_0101)
_LOW = np.uint64(0x7F7F_7F7F_7F7F_7F7F)
_TOPS = np.uint64(0x8080_8080_8080_8080)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

_ONES_OF = np.zeros((256, 8), np.int64)
"""Where the ones of a byte are, from its highest bit down."""
_NUM_ONES = np.zeros(256, np.int64)
for _byte in range(256):
    _places = [place for place in range(8) if _byte & (0x80 >> place)]
    _ONES_OF[_byte, : len(_places)] = _places
    _NUM_ONES[_byte] = len(_places)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]


def find_changes(
    old: Patterns,
    new: Patterns,
    old_words: Words,
    new_words: Words,
    positions: Indices,
    before: Patterns,
    after: Patterns,
) -> int:
    """Write the positions of the elements that differ, and both elements; return how many, or -1 if they do not fit.

    The words are the same memory, without an incomplete word at the end. One more is written than is counted.
    """
    per_word = 8 // old.itemsize
    room = positions.size - _WORDS_COMPARED * per_word
    count = 0
    for stretch in range(old_words.size // _WORDS_COMPARED):
        differs = np.uint64(0)
        for at in range(_WORDS_COMPARED):
            differs |= old_words[stretch * _WORDS_COMPARED + at] ^ new_words[stretch * _WORDS_COMPARED + at]
        if differs:
            if count >= room:
                return -1
            for at in range(_WORDS_COMPARED):
                word = stretch * _WORDS_COMPARED + at
                if old_words[word] != new_words[word]:
                    for place in range(per_word):
                        position = word * per_word + place
                        positions[count] = position
                        before[count] = old[position]
                        after[count] = new[position]
                        count += old[position] != new[position]
    if count >= room:
        return -1
    for position in range(old_words.size // _WORDS_COMPARED * _WORDS_COMPARED * per_word, old.size):
        positions[count] = position
        before[count] = old[position]
        after[count] = new[position]
        count += old[position] != new[position]
    return count


def count_exponents(tile: Patterns, every: int, shift: int, counts: Indices) -> None:
    """Add to the count of each exponent, in every so many elements."""
    mask = counts.size - 1
    for at in range(0, tile.size, every):
        counts[(np.int64(tile[at]) >> shift) & mask] += 1


def count_classes(
    tile: Patterns, shift: int, mask: int, lowest: int, classes: Bytes, counts: Bytes, totals: Indices
) -> None:
    """Write the class of every element, how many each block has of every class, and how many came before a stretch."""
    element = tile.dtype.type
    highest = counts.shape[0] - 1
    for begin in range(0, counts.shape[1], _CACHED):
        # Slices start at 0: what might be a negative index is not compiled to wide instructions.
        part = tile[begin * BLOCK : (begin + _CACHED) * BLOCK]
        here = classes[begin * BLOCK : (begin + _CACHED) * BLOCK]
        for at in range(part.size):
            number = np.int16(np.int16((part[at] >> element(shift)) & element(mask)) - np.int16(lowest))
            number = max(number, np.int16(0))
            here[at] = np.uint8(min(number, np.int16(highest)))
        for which in range(highest + 1):
            wanted = np.uint8(which)
            row = counts[which, begin : begin + _CACHED]
            for block in range(row.size):
                total = np.uint8(0)
                for half in range(BLOCK // _LANES):
                    part_total = np.uint8(0)
                    for at in range(_LANES):
                        part_total += np.uint8(here[block * BLOCK + half * _LANES + at] == wanted)
                    total += part_total
                row[block] = total
    for which in range(highest + 1):
        running = 0
        for block in range(counts.shape[1]):
            if block % STRIDE == 0:
                totals[which, block // STRIDE] = running
            running += counts[which, block]
        totals[which, totals.shape[1] - 1] = running


def rank_positions(words: Words, counts: Bytes, totals: Indices, positions: Indices, ranks: Indices) -> None:
    """Write the rank of every position among the elements of its class. `words` are the classes, eight to a word."""
    for index in range(positions.size):
        position = positions[index]
        last = position >> 3
        shift = np.uint64(8 * (position & 7))
        which = (words[last] >> shift) & np.uint64(255)
        wanted = which * _ONES
        block = position // BLOCK
        rank = totals[which, block // STRIDE]
        for earlier in range(block - block % STRIDE, block):
            rank += counts[which, earlier]
        for at in range(block * (BLOCK // 8), last + 1):
            other = words[at] ^ wanted
            if at == last:  # only the bytes below the position count
                other |= _ALL << shift
            members = ~(((other & _LOW) + _LOW) | other | _LOW)
            rank += np.int64(((members >> np.uint64(7)) * _ONES) >> np.uint64(56))
        ranks[index] = rank


def find_ranks(words: Words, counts: Bytes, totals: Indices, which: int, ranks: Indices, positions: Indices) -> None:
    """Write the position of every rank of one class; ranks ascend and are below the number of members.

    `words` are the classes, eight to a word.
    """
    stretch = 0
    wanted = np.uint64(which) * _ONES
    for index in range(ranks.size):
        while totals[which, stretch + 1] <= ranks[index]:
            stretch += 1
        left = ranks[index] - totals[which, stretch]
        block = stretch * STRIDE
        while left >= counts[which, block]:
            left -= counts[which, block]
            block += 1
        at = block * (BLOCK // 8)
        while True:
            other = words[at] ^ wanted
            # The top bit of every byte that is zero, that is, of every member.
            members = ~(((other & _LOW) + _LOW) | other | _LOW)
            here = np.int64(((members >> np.uint64(7)) * _ONES) >> np.uint64(56))
            if left < here:
                break
            left -= here
            at += 1
        # Byte i: the members up to it. The bytes where these are not yet enough come before the one that is wanted.
        up_to = (members >> np.uint64(7)) * _ONES
        before = (((np.uint64(left) * _ONES) | _TOPS) - up_to) & _TOPS
        positions[index] = at * 8 + np.int64(((before >> np.uint64(7)) * _ONES) >> np.uint64(56))


def sum_quotients(indices: Indices, k: int) -> int:
    """Return the sum of the gaps between indices, each without its k low bits."""
    total = indices[0] >> k
    for index in range(1, indices.size):
        total += (indices[index] - indices[index - 1] - 1) >> k
    return total


def write_unary(indices: Indices, k: int, unary: Bytes, planes: Bytes) -> None:
    """Set the ones of zeroed bit strings; `planes` has one row for each of the k low bits."""
    at = 0
    next_index = 0
    for index in range(indices.size):
        gap = indices[index] - next_index
        next_index = indices[index] + 1
        at += gap >> k
        unary[at >> 3] |= np.uint8(0x80 >> (at & 7))
        at += 1
        for plane in range(k):
            planes[plane, index >> 3] |= np.uint8(((gap >> plane) & 1) << (7 - (index & 7)))


def read_unary(unary: Bytes, planes: Bytes, k: int, size: int, indices: Indices) -> bool:
    """Write the indices; return whether there are as many ones and all indices are below `size`."""
    count = 0
    start = 0
    for at in range(unary.size):
        byte = unary[at]
        for which in range(_NUM_ONES[byte]):
            if count == indices.size:
                return False
            end = at * 8 + _ONES_OF[byte, which]
            indices[count] = (end - start) << k
            count += 1
            start = end + 1
    if count < indices.size:
        return False
    for plane in range(k):
        for at in range(planes.shape[1]):
            byte = planes[plane, at]
            for place in range(min(8, count - at * 8)):
                indices[at * 8 + place] |= ((np.int64(byte) >> (7 - place)) & 1) << plane
    next_index = 0
    for index in range(count):
        gap = indices[index]
        if gap >= size - next_index:
            return False
        indices[index] = next_index + gap
        next_index += gap + 1
    return True


def write_units(signs: Bytes, steps: Patterns) -> None:
    """Write 1 for every bit that is set and -1 for every other one."""
    element = steps.dtype.type
    for index in range(steps.size):
        positive = (signs[index >> 3] >> (7 - (index & 7))) & 1
        steps[index] = element(2 * positive) - element(1)


def add_floats(tile: Patterns, positions: Indices, distances: Patterns, top: int) -> None:
    """Move elements whose highest bit `top` is a sign."""
    element = tile.dtype.type
    sign = element(top)
    for index in range(positions.size):
        old = tile[positions[index]]
        key = element((~old if old & sign else old ^ sign) + distances[index])
        tile[positions[index]] = element(key ^ sign if key & sign else ~key)


def write_fields(values: Words, bits: int, packed: Bytes) -> None:
    """Set the ones of a zeroed bit string to the low bits of each value, the lowest first."""
    at = 0
    for index in range(values.size):
        value = values[index]
        for place in range(bits):
            packed[at >> 3] |= np.uint8(((value >> np.uint64(place)) & np.uint64(1)) << np.uint64(7 - (at & 7)))
            at += 1


def read_fields(packed: Bytes, bits: int, values: Words) -> None:
    """Write each value."""
    at = 0
    for index in range(values.size):
        value = np.uint64(0)
        for place in range(bits):
            bit = (np.uint64(packed[at >> 3]) >> np.uint64(7 - (at & 7))) & np.uint64(1)
            value |= bit << np.uint64(place)
            at += 1
        values[index] = value
