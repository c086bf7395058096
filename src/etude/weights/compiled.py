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
_STRIDE = 8
"""Blocks between two running totals."""
_WORDS = 16
"""Words that are compared together."""
_NO_CLASS = 255
"""Behind the last element, so that every block is whole."""
_ONES = np.uint64(0x0101_0101_0101_0101)
_LOW = np.uint64(0x7F7F_7F7F_7F7F_7F7F)
_TOPS = np.uint64(0x8080_8080_8080_8080)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]


def scan_words(old: Words, new: Words, found: Indices) -> int:
    """Write the positions of words that differ; return how many."""
    count = 0
    whole = old.size - old.size % _WORDS
    for begin in range(0, whole, _WORDS):
        any_bit = np.uint64(0)
        for at in range(_WORDS):
            any_bit |= old[begin + at] ^ new[begin + at]
        if any_bit:
            for at in range(_WORDS):
                found[count] = begin + at
                count += old[begin + at] != new[begin + at]
    for at in range(whole, old.size):
        found[count] = at
        count += old[at] != new[at]
    return count


def expand_words(old: Words, new: Words, words: Indices, bits: int, positions: Indices) -> int:
    """Write the positions of the elements of `bits` bits that differ within these words; return how many."""
    per_word = 64 // bits
    mask = _ALL >> np.uint64(64 - bits)
    count = 0
    for index in range(words.size):
        word = words[index]
        differs = old[word] ^ new[word]
        for place in range(per_word):
            positions[count] = word * per_word + place
            count += ((differs >> np.uint64(place * bits)) & mask) != 0
    return count


def classify(tile: Patterns, shift: int, mask: int, lowest: int, highest: int, classes: Bytes) -> None:
    """Write the class of every element."""
    element = tile.dtype.type
    for at in range(tile.size):
        number = np.int16(np.int16((tile[at] >> element(shift)) & element(mask)) - np.int16(lowest))
        number = max(number, np.int16(0))
        classes[at] = np.uint8(min(number, np.int16(highest)))


def count_classes(classes: Bytes, counts: Bytes, totals: Indices) -> None:
    """Write for every class the number of its elements in each block, and those before every `_STRIDE` blocks."""
    for which in range(counts.shape[0]):
        wanted = np.uint8(which)
        for block in range(counts.shape[1]):
            total = np.uint8(0)
            for at in range(_BLOCK):
                total += np.uint8(classes[block * _BLOCK + at] == wanted)
            counts[which, block] = total
    for which in range(counts.shape[0]):
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


def write_unary(gaps: Indices, k: int, unary: Bytes, planes: Bytes) -> None:
    """Set the ones of zeroed bit strings; `planes` has one row for each of the k low bits."""
    at = 0
    for index in range(gaps.size):
        gap = gaps[index]
        at += gap >> k
        unary[at >> 3] |= np.uint8(0x80 >> (at & 7))
        at += 1
        for plane in range(k):
            planes[plane, index >> 3] |= np.uint8(((gap >> plane) & 1) << (7 - (index & 7)))


def read_unary(unary: Bytes, planes: Bytes, k: int, gaps: Indices) -> bool:
    """Write the gaps; return whether there were as many ones as gaps."""
    count = 0
    start = 0
    for at in range(unary.size * 8):
        if unary[at >> 3] & (0x80 >> (at & 7)):
            if count == gaps.size:
                return False
            gap = (at - start) << k
            for plane in range(k):
                gap |= ((np.int64(planes[plane, count >> 3]) >> (7 - (count & 7))) & 1) << plane
            gaps[count] = gap
            count += 1
            start = at + 1
    return count == gaps.size


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
_WORD_LIST = "Array(uint64, 1, 'C', readonly=True)"
_INDEX_LIST, _INDEX_ROWS = "Array(int64, 1, 'C', readonly=True)", "Array(int64, 2, 'C', readonly=True)"
_SIGNATURES: tuple[tuple[Callable[..., Any], str], ...] = (
    (scan_words, f"int64({_WORD_LIST}, {_WORD_LIST}, int64[::1])"),
    (expand_words, f"int64({_WORD_LIST}, {_WORD_LIST}, {_INDEX_LIST}, int64, int64[::1])"),
    (count_classes, f"void({_BYTES}, uint8[:, ::1], int64[:, ::1])"),
    (rank_positions, f"void({_WORD_LIST}, {_ROWS}, {_INDEX_ROWS}, {_INDEX_LIST}, int64[::1])"),
    (find_ranks, f"void({_WORD_LIST}, {_ROWS}, {_INDEX_ROWS}, int64, {_INDEX_LIST}, int64[::1])"),
    (write_unary, f"void({_INDEX_LIST}, int64, uint8[::1], uint8[:, ::1])"),
    (read_unary, f"boolean({_BYTES}, {_ROWS}, int64, int64[::1])"),
    (write_fields, f"void({_WORD_LIST}, int64, uint8[::1])"),
    (read_fields, f"void({_BYTES}, int64, uint64[::1])"),
)
"""Every loop for exactly what it is called with, so that nothing is compiled later by surprise."""
_CLASSIFY = [
    f"void(Array(uint{bits}, 1, 'C', readonly=True), int64, int64, int64, int64, uint8[::1])" for bits in (8, 16, 32)
]


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
        _loop(classify)(tile, layout.mantissa_bits, mask, lowest, count - 1, self._classes)
        _loop(count_classes)(self._classes, self._counts, self._totals)
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

    def changed(self, old: Patterns, new: Patterns) -> Indices:
        """See `Kernels`."""
        per_word = 8 // old.dtype.itemsize
        whole = old.size - old.size % per_word
        older, newer = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
        # One more than can differ: the loops write before they know whether they keep it.
        words = np.empty(older.size + 1, np.int64)
        words = words[: _loop(scan_words)(older, newer, words)]
        positions = np.empty(words.size * per_word + 1, np.int64)
        positions = positions[: _loop(expand_words)(older, newer, words, 8 * old.dtype.itemsize, positions)]
        tail = np.flatnonzero(old[whole:] != new[whole:])
        return np.concatenate((positions, tail + whole)) if tail.size else positions

    def classes(self, tile: Patterns, lowest: int, count: int, layout: Layout) -> Classes:
        """See `Kernels`."""
        return NumbaClasses(tile, lowest, count, layout)

    def write_rice(self, gaps: Indices, k: int, num_bits: int) -> bytes:
        """See `Kernels`."""
        unary = np.zeros((num_bits + 7) // 8, np.uint8)
        planes = np.zeros((k, (gaps.size + 7) // 8), np.uint8)
        _loop(write_unary)(gaps, k, unary, planes)
        return unary.tobytes() + planes.tobytes()

    def read_rice(self, unary: Bytes, planes: Bytes, count: int, k: int) -> Indices | None:
        """See `Kernels`."""
        gaps = np.empty(count, np.int64)
        complete = _loop(read_unary)(unary, planes.reshape(k, (count + 7) // 8), k, gaps)
        return gaps if complete else None

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
    for function, signature in (*_SIGNATURES, (classify, _CLASSIFY)):
        compile_loop = cast("Callable[..., Callable[..., Any]]", numba.njit(signature, cache=True, nogil=True))
        loops[function.__name__] = compile_loop(inspect.unwrap(function))
    return loops
