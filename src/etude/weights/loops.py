"""The inner loops that numba compiles: plain numbers and arrays, nothing else."""

import numpy as np

from etude.weights.kernels import Indices
from etude.weights.lanes import LANES, bits_from, count_ones, differing_lanes, fetch_early, first_one, nth_one
from etude.weights.members import (
    BITS,
    BLOCK,
    HALVES,
    NUMBERS,
    STRETCH,
    STRETCHES,
    Bytes,
    Words,
    add_up,
    class_at,
    count_members,
    members_of,
    stretch_with,
    write_planes,
)
from etude.weights.ulp import Patterns

_AHEAD = 24
"""Changes before its turn that an element is asked for: memory works on about as many at once."""
_WORD = 8
"""Bytes that are read together."""
_SPREAD, _LOWEST = np.uint64(0x8040_2010_0804_0201), np.uint64(0x0101_0101_0101_0101)
_LINE = 32
"""Elements of two bytes that memory hands over together."""


def find_changes(old: Patterns, new: Patterns, positions: Indices, before: Patterns, after: Patterns) -> int:
    """Write the positions of the elements that differ, and both elements; return how many, or -1 if they do not fit."""
    count = 0
    whole = old.size - old.size % LANES
    for begin in range(0, whole, LANES):
        differing = differing_lanes(old, new, begin)
        if differing:
            if count + LANES > positions.size:
                return -1
            while differing:
                position = begin + first_one(differing)
                differing &= differing - np.uint64(1)
                positions[count] = position
                before[count] = old[position]
                after[count] = new[position]
                count += 1
    if count + LANES > positions.size:
        return -1
    for position in range(whole, old.size):
        if old[position] != new[position]:
            positions[count] = position
            before[count] = old[position]
            after[count] = new[position]
            count += 1
    return count


def fetch_share(tile: Patterns, begin: int, number: int, count: int) -> None:
    """Have one of `count` shares of the block that begins there fetched, while the one before it is worked on.

    The processor foresees what a loop reads, but not what it reads after thousands of instructions that read nothing.
    """
    size = min(BLOCK, tile.size - begin)
    for at in range(begin + size * number // count, begin + size * (number + 1) // count, _LINE):
        fetch_early(tile, at)


def rank_positions(
    tile: Patterns,
    shift: int,
    lowest: int,
    positions: Indices,
    numbers: Bytes,
    ranks: Indices,
    members: Indices,
) -> None:
    """Write class and rank within it of every position, and how many members each class has."""
    planes, counts = np.empty(BITS * HALVES * STRETCHES, np.uint64), np.empty(NUMBERS * STRETCHES, np.uint16)
    here = np.empty(members.size, np.int64)
    members[:] = 0
    index = 0
    for begin in range(0, tile.size, BLOCK):
        write_planes(tile, begin, shift, lowest, members.size - 1, planes)
        count_members(planes, counts)
        for number in range(members.size):
            fetch_share(tile, begin + BLOCK, number, members.size)
            here[number] = add_up(counts, number)
        while index < positions.size and positions[index] < begin + BLOCK:
            place = positions[index] - begin
            stretch, half, lane = place // STRETCH, place % STRETCH // LANES, place % LANES
            number = class_at(planes, half, stretch, lane)
            earlier = (np.uint64(1) << np.uint64(lane)) - np.uint64(1)
            rank = members[number] + int(counts[number * STRETCHES + stretch])
            # By multiplying instead of a branch, which nobody could foresee.
            rank += half * count_ones(members_of(planes, number, 0, stretch))
            numbers[index] = number
            ranks[index] = rank + count_ones(members_of(planes, number, half, stretch) & earlier)
            index += 1
        members += here


def place_ranks(
    tile: Patterns,
    shift: int,
    lowest: int,
    starts: Indices,
    ranks: Indices,
    positions: Indices,
    members: Indices,
) -> bool:
    """Write the position of every rank, and how many members each class has; return whether there is one for each rank.

    The ranks of class c, ascending, are those from `starts[c]` to `starts[c + 1]`.
    """
    planes, counts = np.empty(BITS * HALVES * STRETCHES, np.uint64), np.empty(NUMBERS * STRETCHES, np.uint16)
    indices = starts[:-1].copy()
    members[:] = 0
    for begin in range(0, tile.size, BLOCK):
        write_planes(tile, begin, shift, lowest, members.size - 1, planes)
        count_members(planes, counts)
        for number in range(members.size):
            fetch_share(tile, begin + BLOCK, number, members.size)
            here = add_up(counts, number)
            index, end, earlier = indices[number], starts[number + 1], members[number]
            while index < end and ranks[index] - earlier < here:
                rank = ranks[index] - earlier
                stretch = stretch_with(counts, number, rank)
                rank -= int(counts[number * STRETCHES + stretch])
                # By multiplying instead of a branch, which nobody could foresee.
                in_first = count_ones(members_of(planes, number, 0, stretch))
                half = int(rank >= in_first)
                lane = nth_one(members_of(planes, number, half, stretch), rank - half * in_first)
                positions[index] = begin + stretch * STRETCH + half * LANES + lane
                index += 1
            indices[number] = index
            members[number] += here
    return bool((indices == starts[1:]).all())


def sum_quotients(indices: Indices, first: int, sums: Indices) -> None:
    """Add up the gaps between indices, of which there is one, each without its k low bits, for every k from `first`."""
    for which in range(sums.size):
        k = np.uint64(first + which)
        total = np.uint64(indices[0]) >> k
        for index in range(1, indices.size):
            total += np.uint64(indices[index] - indices[index - 1] - 1) >> k
        sums[which] = total


def write_unary(indices: Indices, k: int, unary: Bytes, planes: Bytes) -> None:
    """Set the ones of a zeroed bit string, and write a row of `planes` for each of the k low bits."""
    at = 0
    next_index = 0
    gaps = np.zeros(8 * planes.shape[1], np.uint32)
    for index in range(indices.size):
        gap = indices[index] - next_index
        next_index = indices[index] + 1
        gaps[index] = gap
        at += gap >> k
        unary[at >> 3] |= np.uint8(0x80 >> (at & 7))
        at += 1
    # Eight at a time, which compiles to wide instructions.
    for plane in range(k):
        for byte in range(planes.shape[1]):
            bits = np.uint32(0)
            for place in range(8):
                bit = (gaps[byte * 8 + place] >> np.uint32(plane)) & np.uint32(1)
                bits |= bit << np.uint32(7 - place)
            planes[plane, byte] = np.uint8(bits)


def read_lists(data: Bytes, lists: Indices, size: int, indices: Indices) -> bool:
    """Write the indices of all lists; return whether each has as many ones, and all its indices are below `size`.

    A row of `lists` has the bytes of the quotients, the number of gaps and k; planes follow their quotients.
    """
    begin = 0
    first = 0
    for row in range(lists.shape[0]):
        num_unary, count, k = lists[row, 0], lists[row, 1], lists[row, 2]
        planes = begin + num_unary
        end = planes + k * ((count + 7) >> 3)
        if not read_unary(data[begin:planes], data[planes:end], k, size, indices[first : first + count]):
            return False
        begin = end
        first += count
    return True


def read_unary(unary: Bytes, planes: Bytes, k: int, size: int, indices: Indices) -> bool:
    """Write the indices of one list; return whether there are as many ones and all indices are below `size`."""
    count = 0
    start = 0
    whole = unary.size - unary.size % _WORD
    rest = np.zeros(_WORD, np.uint8)
    rest[: unary.size - whole] = unary[whole:]
    for begin in range(0, unary.size, _WORD):
        ones = bits_from(unary, begin) if begin < whole else bits_from(rest, 0)
        while ones:
            if count == indices.size:
                return False
            end = begin * 8 + first_one(ones)
            ones &= ones - np.uint64(1)
            indices[count] = (end - start) << k
            start = end + 1
            count += 1
    if count < indices.size:
        return False
    read_planes(planes, k, indices)
    next_index = 0
    for index in range(count):
        gap = indices[index]
        if gap >= size - next_index:
            return False
        indices[index] = next_index + gap
        next_index += gap + 1
    return True


def read_planes(planes: Bytes, k: int, gaps: Indices) -> None:
    """Set the k low bits of gaps, which are zero, eight gaps at a time."""
    row = (gaps.size + 7) >> 3
    for at in range(row):
        for first in range(0, k, 8):
            low = np.uint64(0)
            for plane in range(first, min(k, first + 8)):
                # Products of a byte with shifts of itself put each of its bits into a byte of its own.
                bits = (np.uint64(planes[plane * row + at]) * _SPREAD >> np.uint64(7)) & _LOWEST
                low |= bits << np.uint64(plane - first)
            for place in range(min(8, gaps.size - at * 8)):
                gaps[at * 8 + place] |= np.int64(low >> np.uint64(8 * place) & np.uint64(0xFF)) << first


def write_units(signs: Bytes, steps: Patterns) -> None:
    """Write 1 for every bit that is set and -1 for every other one."""
    element = steps.dtype.type
    for index in range(steps.size):
        positive = (signs[index >> 3] >> (7 - (index & 7))) & 1
        steps[index] = element(2 * positive) - element(1)


def add_floats(tile: Patterns, positions: Indices, distances: Patterns, top: int) -> None:
    """Move elements whose highest bit, number `top`, is a sign.

    Without a branch: one that waited for an element out of memory would keep the next ones from being fetched.
    """
    element = tile.dtype.type
    sign, one = element(1) << element(top), element(1)
    last = positions.size - 1
    for index in range(positions.size):
        fetch_early(tile, positions[min(index + _AHEAD, last)])
        old = tile[positions[index]]
        # All bits of a negative number are flipped, of others the sign alone; and back.
        key = element(element(old ^ element(sign | element(element(0) - (old >> element(top))))) + distances[index])
        tile[positions[index]] = element(key ^ element(sign | element((key >> element(top)) - one)))


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
