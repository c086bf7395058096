"""One tile, from its old elements to its new ones: the smallest of several codes, and back.

A tile is decoded into a `Patch` first, so that whatever is wrong with it is known before an element is touched.
"""

from enum import IntEnum

import msgspec
import numpy as np

from etude.weights.bits import (
    join,
    optionally_compressed,
    read_optionally_compressed,
    require,
    split,
)
from etude.weights.context import CLASSES, read_changes, write_changes
from etude.weights.kernels import Indices, Kernels, T
from etude.weights.rice import read_gaps, write_gaps
from etude.weights.ulp import Layout, Patterns, steps
from etude.weights.values import SIGN_PARTS, read_signs, write_signs

MAX_TILE = 1 << 22
"""Elements of a tile: what a decoder sizes its memory for."""
_DENSE = 0.25
_GOOD = 0.6
"""Share of the raw bytes above which other codes are tried as well."""
_FEW = 1000
"""Changes below which the parameters of the classes may cost more than they save."""
_MAX_CONTEXT_WIDTH = 4


class Coding(IntEnum):
    """How a tile is written. The values are part of the format."""

    SAME = 0
    """Nothing changed; no bytes."""
    RAW = 1
    """The new elements."""
    PLANES = 2
    """The new elements, each byte of them apart: those with the exponent compress."""
    RICE = 3
    """Gaps between changes, and distances. Can be read, merged and inverted without the old elements."""
    CONTEXT = 4
    """Changes by exponent of the old element."""
    DENSE = 5
    """As `CONTEXT` with a single class, for when most elements changed."""


class Patch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a tile's bytes say, verified against everything but the old elements."""

    positions: Indices | None
    """Distinct, below the tile's size. None when `values` are all new elements."""
    values: Patterns
    """Distances, to be added in the order of the values; or the new elements."""

    def apply(self, tile: T, layout: Layout, kernels: Kernels[T]) -> None:
        """Change the elements of a tile in place, from old to new."""
        if self.positions is None:
            kernels.fill(tile, self.values)
        else:
            kernels.add(tile, self.positions, self.values, layout)


def uses_context(layout: Layout) -> bool:
    """Return whether elements of this kind have an exponent to go by."""
    return layout.exponent_bits > 0 and layout.width <= _MAX_CONTEXT_WIDTH


def write_tile(old: T | None, new: T, *, layout: Layout, kernels: Kernels[T], context: bool) -> tuple[Coding, bytes]:
    """Return the smallest code for a tile, never larger than its elements.

    With `context` the old elements may be needed to read it. Without `old` the new ones stand alone.
    """
    candidates: list[tuple[Coding, bytes]] = []
    if old is not None:
        written = _write_changes(old, new, layout=layout, kernels=kernels, context=context)
        if len(written[1]) < _GOOD * new.nbytes:
            return written
        candidates.append(written)
    values = kernels.fetch(new)
    candidates += [(Coding.PLANES, _write_planes(values, layout)), (Coding.RAW, values.tobytes())]
    return min(candidates, key=lambda found: len(found[1]))


def read_tile(old: T, coding: Coding, blob: memoryview, *, layout: Layout, kernels: Kernels[T]) -> Patch:
    """Return what to do to the old elements; raise `IntegrityError` for bytes that no writer makes.

    Memory is bounded by the tile's size whatever the bytes claim.
    """
    require(len(blob) <= old.nbytes, "it is larger than its elements")
    if coding == Coding.SAME:
        require(not len(blob), "an unchanged tile has bytes")
        return Patch(positions=np.zeros(0, np.int64), values=np.zeros(0, layout.unsigned))
    if coding == Coding.RAW:
        require(len(blob) == old.nbytes, "it has another size than its elements")
        return Patch(positions=None, values=np.frombuffer(blob, layout.unsigned))
    if coding == Coding.PLANES:
        return Patch(positions=None, values=_read_planes(blob, len(old), layout))
    if coding == Coding.RICE:
        gaps, *signs = split(blob, 1 + SIGN_PARTS)
        positions = read_gaps(gaps, len(old), kernels)
        return Patch(positions=positions, values=read_signs(signs, positions.size, layout, kernels))
    require(coding == Coding.DENSE or uses_context(layout), "it needs an exponent, which its dtype does not have")
    count = CLASSES if coding == Coding.CONTEXT else 1
    positions, distances = read_changes(old, blob, count=count, layout=layout, kernels=kernels)
    return Patch(positions=positions, values=distances)


def _write_changes(old: T, new: T, *, layout: Layout, kernels: Kernels[T], context: bool) -> tuple[Coding, bytes]:
    positions, distances = _distances(old, new, layout=layout, kernels=kernels)
    if not positions.size:
        return Coding.SAME, b""
    context = context and uses_context(layout)
    candidates: list[tuple[Coding, bytes]] = []
    if positions.size <= _DENSE * len(old) and (not context or positions.size < _FEW):
        rice = join([write_gaps(positions, kernels), *write_signs(distances, layout, kernels)])
        candidates.append((Coding.RICE, rice))
    if context or not candidates:
        count = CLASSES if context else 1
        changes = write_changes(old, positions, distances, count=count, layout=layout, kernels=kernels)
        candidates.append((Coding.CONTEXT if context else Coding.DENSE, changes))
    return min(candidates, key=lambda found: len(found[1]))


def _distances(old: T, new: T, *, layout: Layout, kernels: Kernels[T]) -> tuple[Indices, Patterns]:
    positions, before, after = kernels.changed(old, new)
    return positions, steps(before, after, layout)


def _write_planes(new: Patterns, layout: Layout) -> bytes:
    """Return the bytes of equal significance together, the highest first."""
    by_place = new.view(np.uint8).reshape(-1, layout.width)
    parts: list[bytes] = []
    for place in reversed(range(layout.width)):
        plane = np.ascontiguousarray(by_place[:, place])
        parts.append(min(b"\0" + plane.tobytes(), optionally_compressed(plane, above=0), key=len))
    return join(parts)


def _read_planes(blob: memoryview, size: int, layout: Layout) -> Patterns:
    values = np.empty((size, layout.width), np.uint8)
    for place, part in zip(reversed(range(layout.width)), split(blob, layout.width), strict=True):
        values[:, place] = read_optionally_compressed(part, size, np.dtype(np.uint8))
    return values.reshape(-1).view(layout.unsigned)
