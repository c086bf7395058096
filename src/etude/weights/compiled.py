"""The inner loops of the codec for numba, which an extra installs: several times as fast, the same bytes.

Loops that count compile to wide instructions: their lengths are fixed, nothing branches, sums are single bytes.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from etude.weights.kernels import Classes, Indices, Kernels, NumpyKernels
from etude.weights.ulp import Layout, Patterns

_BLOCK = 128
"""Elements whose classes are counted together; a count fits a byte."""
_LANES = 64
"""Elements that are compared at once where the processor can; their count is then one instruction."""
_STRIDE = 8
"""Blocks between two running totals."""
_CACHED = 256
"""Blocks whose classes stay in the nearest cache while they are counted."""
_WORDS_COMPARED = 16
"""Words of eight bytes that are compared together."""
_NO_CLASS = 255
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
        part = tile[begin * _BLOCK : (begin + _CACHED) * _BLOCK]
        here = classes[begin * _BLOCK : (begin + _CACHED) * _BLOCK]
        for at in range(part.size):
            number = np.int16(np.int16((part[at] >> element(shift)) & element(mask)) - np.int16(lowest))
            number = max(number, np.int16(0))
            here[at] = np.uint8(min(number, np.int16(highest)))
        for which in range(highest + 1):
            wanted = np.uint8(which)
            row = counts[which, begin : begin + _CACHED]
            for block in range(row.size):
                total = np.uint8(0)
                for half in range(_BLOCK // _LANES):
                    part_total = np.uint8(0)
                    for at in range(_LANES):
                        part_total += np.uint8(here[block * _BLOCK + half * _LANES + at] == wanted)
                    total += part_total
                row[block] = total
    for which in range(highest + 1):
        running = 0
        for block in range(counts.shape[1]):
            if block % _STRIDE == 0:
                totals[which, block // _STRIDE] = running
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
        block = position // _BLOCK
        rank = totals[which, block // _STRIDE]
        for earlier in range(block - block % _STRIDE, block):
            rank += counts[which, earlier]
        for at in range(block * (_BLOCK // 8), last + 1):
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
        block = stretch * _STRIDE
        while left >= counts[which, block]:
            left -= counts[which, block]
            block += 1
        at = block * (_BLOCK // 8)
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


_BYTES, _ROWS = "Array(uint8, 1, 'C', readonly=True)", "Array(uint8, 2, 'C', readonly=True)"
_WORDS = "Array(uint64, 1, 'C', readonly=True)"
_INDICES, _INDEX_ROWS = "Array(int64, 1, 'C', readonly=True)", "Array(int64, 2, 'C', readonly=True)"
_TILES = {f"uint{bits}": f"Array(uint{bits}, 1, 'C', readonly=True)" for bits in (8, 16, 32, 64)}
_SIGNATURES: tuple[tuple[Callable[..., Any], list[str]], ...] = (
    (
        find_changes,
        [
            f"int64({tile}, {tile}, {_WORDS}, {_WORDS}, int64[::1], {name}[::1], {name}[::1])"
            for name, tile in _TILES.items()
        ],
    ),
    (count_exponents, [f"void({tile}, int64, int64, int64[::1])" for tile in _TILES.values()]),
    (
        count_classes,
        [f"void({tile}, int64, int64, int64, uint8[::1], uint8[:, ::1], int64[:, ::1])" for tile in _TILES.values()],
    ),
    (rank_positions, [f"void({_WORDS}, {_ROWS}, {_INDEX_ROWS}, {_INDICES}, int64[::1])"]),
    (find_ranks, [f"void({_WORDS}, {_ROWS}, {_INDEX_ROWS}, int64, {_INDICES}, int64[::1])"]),
    (sum_quotients, [f"int64({_INDICES}, int64)"]),
    (write_unary, [f"void({_INDICES}, int64, uint8[::1], uint8[:, ::1])"]),
    (read_unary, [f"boolean({_BYTES}, {_ROWS}, int64, int64, int64[::1])"]),
    (write_units, [f"void({_BYTES}, {name}[::1])" for name in _TILES]),
    (add_floats, [f"void({name}[::1], {_INDICES}, {tile}, uint64)" for name, tile in _TILES.items()]),
    (write_fields, [f"void({_WORDS}, int64, uint8[::1])"]),
    (read_fields, [f"void({_BYTES}, int64, uint64[::1])"]),
)
"""Every loop for exactly what it is called with, so that nothing is compiled later by surprise."""


class NumbaClasses:
    """One byte per element, and counts per block that say where to look."""

    def __init__(self, tile: Patterns, lowest: int, count: int, layout: Layout) -> None:
        """See `Kernels.classes`."""
        blocks = -(-tile.size // _BLOCK)
        self._classes = np.empty(blocks * _BLOCK, np.uint8)
        self._classes[tile.size :] = _NO_CLASS
        self._counts = np.empty((count, blocks), np.uint8)
        self._totals = np.empty((count, -(-blocks // _STRIDE) + 1), np.int64)
        mask = (1 << layout.exponent_bits) - 1
        _loop(count_classes)(tile, layout.mantissa_bits, mask, lowest, self._classes, self._counts, self._totals)
        self.members: Indices = self._totals[:, -1].copy()

    def ranks(self, positions: Indices) -> tuple[Bytes, Indices]:
        """See `Classes`."""
        ranks = np.empty(positions.size, np.int64)
        _loop(rank_positions)(self._classes.view(np.uint64), self._counts, self._totals, positions, ranks)
        return self._classes[positions], ranks

    def positions(self, which: int, ranks: Indices) -> Indices:
        """See `Classes`."""
        positions = np.empty(ranks.size, np.int64)
        _loop(find_ranks)(self._classes.view(np.uint64), self._counts, self._totals, which, ranks, positions)
        return positions


class NumbaKernels:
    """Compiled loops; a cache on disk makes compiling them a matter of the first process."""

    def changed(self, old: Patterns, new: Patterns) -> tuple[Indices, Patterns, Patterns]:
        """See `Kernels`."""
        whole = old.size - old.size % (8 // old.itemsize)
        old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
        spare = 2 * _BLOCK
        for room in (old.size // 16 + spare, old.size + spare):
            positions = np.empty(room, np.int64)
            before, after = np.empty(room, old.dtype), np.empty(room, old.dtype)
            count = _loop(find_changes)(old, new, old_words, new_words, positions, before, after)
            if count >= 0:
                return positions[:count], before[:count], after[:count]
        raise AssertionError("more elements differ than there are")

    def exponents(self, tile: Patterns, every: int, layout: Layout) -> Indices:
        """See `Kernels`."""
        counts = np.zeros(1 << layout.exponent_bits, np.int64)
        _loop(count_exponents)(tile, every, layout.mantissa_bits, counts)
        return counts

    def classes(self, tile: Patterns, lowest: int, count: int, layout: Layout) -> Classes:
        """See `Kernels`."""
        return NumbaClasses(tile, lowest, count, layout)

    def quotients(self, indices: Indices, k: int) -> int:
        """See `Kernels`."""
        return int(_loop(sum_quotients)(indices, k))

    def write_rice(self, indices: Indices, k: int, num_bits: int) -> bytes:
        """See `Kernels`."""
        unary = np.zeros((num_bits + 7) // 8, np.uint8)
        planes = np.zeros((k, (indices.size + 7) // 8), np.uint8)
        _loop(write_unary)(indices, k, unary, planes)
        return unary.tobytes() + planes.tobytes()

    def read_rice(self, unary: Bytes, planes: Bytes, count: int, k: int, size: int) -> Indices | None:
        """See `Kernels`."""
        indices = np.empty(count, np.int64)
        complete = _loop(read_unary)(unary, planes.reshape(k, (count + 7) // 8), k, size, indices)
        return indices if complete else None

    def unit_steps(self, signs: Bytes, count: int, layout: Layout) -> Patterns:
        """See `Kernels`."""
        steps = np.empty(count, layout.unsigned)
        _loop(write_units)(signs, steps)
        return steps

    def add(self, tile: Patterns, positions: Indices, distances: Patterns, layout: Layout) -> None:
        """See `Kernels`."""
        if layout.exponent_bits:
            _loop(add_floats)(tile, positions, distances, 1 << (layout.bits - 1))
        else:
            tile[positions] += distances

    def write_low_bits(self, values: Patterns, bits: int) -> bytes:
        """See `Kernels`."""
        packed = np.zeros((values.size * bits + 7) // 8, np.uint8)
        _loop(write_fields)(values.astype(np.uint64), bits, packed)
        return packed.tobytes()

    def read_low_bits(self, data: Bytes, count: int, bits: int) -> Words:
        """See `Kernels`."""
        values = np.empty(count, np.uint64)
        _loop(read_fields)(data, bits, values)
        return values


@functools.cache
def fastest_kernels() -> Kernels:
    """Return the compiled loops where numba is installed, else those of numpy."""
    return NumbaKernels() if importlib.util.find_spec("numba") else NumpyKernels()


def _loop(function: Callable[..., Any]) -> Callable[..., Any]:
    return _compiled()[inspect.unwrap(function).__name__]


@functools.cache
def _compiled() -> dict[str, Callable[..., Any]]:
    import numba  # noqa: PLC0415 - an extra; costs half a second that only coding weights need pay

    # Unwrapped: the tests put type checks around every function, which no compiler understands.
    loops: dict[str, Callable[..., Any]] = {}
    for function, signatures in _SIGNATURES:
        compile_loop = cast("Callable[..., Callable[..., Any]]", numba.njit(signatures, cache=True, nogil=True))
        loops[function.__name__] = compile_loop(inspect.unwrap(function))
    return loops
