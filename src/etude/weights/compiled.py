"""The inner loops of the codec for numba, which an extra installs: several times as fast, the same bytes."""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from etude.weights.kernels import Classes, Indices, Kernels, NumpyKernels
from etude.weights.loops import (
    BLOCK,
    NO_CLASS,
    STRIDE,
    Bytes,
    Words,
    add_floats,
    count_classes,
    count_exponents,
    find_changes,
    find_ranks,
    rank_positions,
    read_fields,
    read_unary,
    sum_quotients,
    write_fields,
    write_unary,
    write_units,
)
from etude.weights.ulp import Layout, Patterns

_WORTH_COMPILING = 1 << 21
"""Elements from which on loading the compiler's work, or doing it, is paid back within a few versions."""
_BYTES, _ROWS = "Array(uint8, 1, 'C', readonly=True)", "Array(uint8, 2, 'C', readonly=True)"
_WORDS = "Array(uint64, 1, 'C', readonly=True)"
_INDICES, _INDEX_ROWS = "Array(int64, 1, 'C', readonly=True)", "Array(int64, 2, 'C', readonly=True)"
_TILE, _OUT = "Array({element}, 1, 'C', readonly=True)", "{element}[::1]"
_SIGNATURES: dict[Callable[..., Any], str] = {
    find_changes: f"int64({_TILE}, {_TILE}, {_WORDS}, {_WORDS}, int64[::1], {_OUT}, {_OUT})",
    count_exponents: f"void({_TILE}, int64, int64, int64[::1])",
    count_classes: f"void({_TILE}, int64, int64, int64, uint8[::1], uint8[:, ::1], int64[:, ::1])",
    rank_positions: f"void({_WORDS}, {_ROWS}, {_INDEX_ROWS}, {_INDICES}, int64[::1])",
    find_ranks: f"void({_WORDS}, {_ROWS}, {_INDEX_ROWS}, int64, {_INDICES}, int64[::1])",
    sum_quotients: f"int64({_INDICES}, int64)",
    write_unary: f"void({_INDICES}, int64, uint8[::1], uint8[:, ::1])",
    read_unary: f"boolean({_BYTES}, {_ROWS}, int64, int64, int64[::1])",
    write_units: f"void({_BYTES}, {_OUT})",
    add_floats: f"void({_OUT}, {_INDICES}, {_TILE}, uint64)",
    write_fields: f"void({_WORDS}, int64, uint8[::1])",
    read_fields: f"void({_BYTES}, int64, uint64[::1])",
}
"""What every loop is called with; `element` is the type of a tile's elements."""


class NumbaClasses:
    """One byte per element, and counts per block that say where to look."""

    def __init__(self, tile: Patterns, lowest: int, count: int, layout: Layout) -> None:
        """See `Kernels.classes`."""
        blocks = -(-tile.size // BLOCK)
        self._classes = np.empty(blocks * BLOCK, np.uint8)
        self._classes[tile.size :] = NO_CLASS
        self._counts = np.empty((count, blocks), np.uint8)
        self._totals = np.empty((count, -(-blocks // STRIDE) + 1), np.int64)
        mask = (1 << layout.exponent_bits) - 1
        _loop(count_classes, tile.dtype.name)(
            tile, layout.mantissa_bits, mask, lowest, self._classes, self._counts, self._totals
        )
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
        spare = 2 * BLOCK
        for room in (old.size // 16 + spare, old.size + spare):
            positions = np.empty(room, np.int64)
            before, after = np.empty(room, old.dtype), np.empty(room, old.dtype)
            count = _loop(find_changes, old.dtype.name)(old, new, old_words, new_words, positions, before, after)
            if count >= 0:
                return positions[:count], before[:count], after[:count]
        raise AssertionError("more elements differ than there are")

    def exponents(self, tile: Patterns, every: int, layout: Layout) -> Indices:
        """See `Kernels`."""
        counts = np.zeros(1 << layout.exponent_bits, np.int64)
        _loop(count_exponents, tile.dtype.name)(tile, every, layout.mantissa_bits, counts)
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
        _loop(write_units, steps.dtype.name)(signs, steps)
        return steps

    def add(self, tile: Patterns, positions: Indices, distances: Patterns, layout: Layout) -> None:
        """See `Kernels`."""
        if layout.exponent_bits:
            _loop(add_floats, tile.dtype.name)(tile, positions, distances, 1 << (layout.bits - 1))
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


def fastest_kernels(num_elements: int) -> Kernels:
    """Return the compiled loops where numba is installed and there is enough to do, else those of numpy."""
    worth_it = num_elements >= _WORTH_COMPILING and importlib.util.find_spec("numba") is not None
    return NumbaKernels() if worth_it else NumpyKernels()


@functools.cache
def _loop(function: Callable[..., Any], element: str = "") -> Callable[..., Any]:
    import numba  # noqa: PLC0415 - an extra; costs half a second that only coding large tensors need pay

    signature = _SIGNATURES[function].format(element=element)
    compiled = cast("Callable[..., Callable[..., Any]]", numba.njit([signature], cache=True, nogil=True))
    # Unwrapped: the tests put type checks around every function, which no compiler understands.
    return compiled(inspect.unwrap(function))
