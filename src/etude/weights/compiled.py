"""The inner loops of the codec for numba, which an extra installs: several times as fast, the same bytes."""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from etude.weights.kernels import HostTiles, Indices, Kernels, NumpyKernels
from etude.weights.lanes import LANES
from etude.weights.loops import (
    Bytes,
    Words,
    add_floats,
    fetch_share,
    find_changes,
    place_ranks,
    rank_positions,
    read_fields,
    read_lists,
    read_planes,
    read_unary,
    sum_quotients,
    write_fields,
    write_unary,
    write_units,
)
from etude.weights.members import (
    add_up,
    class_at,
    count_four,
    count_members,
    members_of,
    members_of_four,
    stretch_with,
    write_planes,
)
from etude.weights.ulp import Layout, Patterns

_WORTH_COMPILING = 1 << 21
"""Elements from which on loading the compiler's work, or doing it, is paid back within a few versions."""
_BYTES, _ROWS = "Array(uint8, 1, 'C', readonly=True)", "Array(int64, 2, 'C', readonly=True)"
_WORDS, _INDICES = "Array(uint64, 1, 'C', readonly=True)", "Array(int64, 1, 'C', readonly=True)"
_TILE, _OUT = "Array({element}, 1, 'C', readonly=True)", "{element}[::1]"
_SIGNATURES: dict[Callable[..., Any], str] = {
    find_changes: f"int64({_TILE}, {_TILE}, int64[::1], {_OUT}, {_OUT})",
    rank_positions: f"void({_TILE}, int64, int64, {_INDICES}, uint8[::1], int64[::1], int64[::1])",
    place_ranks: f"boolean({_TILE}, int64, int64, {_INDICES}, {_INDICES}, int64[::1], int64[::1])",
    sum_quotients: f"void({_INDICES}, int64, int64[::1])",
    write_unary: f"void({_INDICES}, int64, uint8[::1], uint8[:, ::1])",
    read_lists: f"boolean({_BYTES}, {_ROWS}, int64, int64[::1])",
    write_units: f"void({_BYTES}, {_OUT})",
    add_floats: f"void({_OUT}, {_INDICES}, {_TILE}, int64)",
    write_fields: f"void({_WORDS}, int64, uint8[::1])",
    read_fields: f"void({_BYTES}, int64, uint64[::1])",
}
"""What every loop is called with; `element` is the type of a tile's elements."""


class NumbaKernels(HostTiles):
    """Compiled loops; a cache on disk makes compiling them a matter of the first process."""

    def changed(self, old: Patterns, new: Patterns) -> tuple[Indices, Patterns, Patterns]:
        """See `Kernels`."""
        for room in (old.size // 16 + 2 * LANES, old.size + LANES):
            positions = np.empty(room, np.int64)
            before, after = np.empty(room, old.dtype), np.empty(room, old.dtype)
            count = _loop(find_changes, old.dtype.name)(old, new, positions, before, after)
            if count >= 0:
                return positions[:count], before[:count], after[:count]
        raise AssertionError("more elements differ than there are")

    def ranks(
        self, tile: Patterns, positions: Indices, lowest: int, count: int, layout: Layout
    ) -> tuple[Bytes, Indices, Indices]:
        """See `Kernels`."""
        numbers, ranks = np.empty(positions.size, np.uint8), np.empty(positions.size, np.int64)
        members = np.empty(count, np.int64)
        loop = _loop(rank_positions, tile.dtype.name)
        loop(tile, layout.mantissa_bits, lowest, positions, numbers, ranks, members)
        return numbers, ranks, members

    def positions(
        self, tile: Patterns, ranks: Sequence[Indices], lowest: int, layout: Layout
    ) -> tuple[Indices, Indices] | None:
        """See `Kernels`."""
        starts = np.cumsum([0, *map(len, ranks)], dtype=np.int64)
        positions, members = np.empty(starts[-1], np.int64), np.empty(len(ranks), np.int64)
        loop = _loop(place_ranks, tile.dtype.name)
        complete = loop(tile, layout.mantissa_bits, lowest, starts, np.concatenate(ranks), positions, members)
        return (positions, members) if complete else None

    def quotients(self, indices: Indices, ks: range) -> list[int]:
        """See `Kernels`."""
        sums = np.zeros(len(ks), np.int64)
        _loop(sum_quotients)(indices, ks[0], sums)
        return sums.tolist()

    def write_rice(self, indices: Indices, k: int, num_bits: int) -> bytes:
        """See `Kernels`."""
        unary = np.zeros((num_bits + 7) // 8, np.uint8)
        planes = np.zeros((k, (indices.size + 7) // 8), np.uint8)
        _loop(write_unary)(indices, k, unary, planes)
        return unary.tobytes() + planes.tobytes()

    def read_rice(self, data: Bytes, lists: Indices, size: int) -> Indices | None:
        """See `Kernels`."""
        indices = np.empty(int(lists[:, 1].sum()), np.int64)
        return indices if _loop(read_lists)(data, lists, size, indices) else None

    def unit_steps(self, signs: Bytes, count: int, layout: Layout) -> Patterns:
        """See `Kernels`."""
        steps = np.empty(count, layout.unsigned)
        _loop(write_units, steps.dtype.name)(signs, steps)
        return steps

    def add(self, tile: Patterns, positions: Indices, distances: Patterns, layout: Layout) -> None:
        """See `Kernels`."""
        if layout.exponent_bits:
            _loop(add_floats, tile.dtype.name)(tile, positions, distances, layout.bits - 1)
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


def fastest_kernels(num_elements: int) -> Kernels[Patterns]:
    """Return the compiled loops where numba is installed and there is enough to do, else those of numpy."""
    worth_it = num_elements >= _WORTH_COMPILING and importlib.util.find_spec("numba") is not None
    return NumbaKernels() if worth_it else NumpyKernels()


@functools.cache
def _loop(function: Callable[..., Any], element: str = "") -> Callable[..., Any]:
    import numba  # noqa: PLC0415 - an extra; costs half a second that only coding large tensors need pay

    _compile_parts()
    signature = _SIGNATURES[function].format(element=element)
    compiled = cast("Callable[..., Callable[..., Any]]", numba.njit([signature], cache=True, nogil=True))
    # Unwrapped: the tests put type checks around every function, which no compiler understands.
    return compiled(inspect.unwrap(function))


@functools.cache
def _compile_parts() -> None:
    from numba.extending import overload  # noqa: PLC0415

    from etude.weights.instructions import teach_lanes  # noqa: PLC0415 - as numba itself

    teach_lanes()
    # Those that others call first.
    for part in (
        members_of,
        members_of_four,
        class_at,
        add_up,
        write_planes,
        count_four,
        count_members,
        stretch_with,
        read_planes,
        read_unary,
        fetch_share,
    ):
        _let_call(overload, part)


def _let_call(overload: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Let functions that are compiled call this one, which is compiled with them."""
    plain = inspect.unwrap(function)
    overload(function, strict=False)(lambda *_: plain)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
