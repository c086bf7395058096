"""Weights into pieces: neighbours that are coded together, and what becomes of them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.policy.sum_hash import Sums, sums_of_changed_runs, sums_of_runs
from etude.weight_types import Box
from etude.weights.boxes import Shape, runs, slabs
from etude.weights.codec import RICE_ULP, Difference, encode
from etude.weights.delta import MAX_TILE
from etude.weights.tensors import FlatTensor
from etude.weights.ulp import LAYOUTS

MAX_GROUP_BYTES = 16 << 20


class Slice(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The box of a tensor that one rank holds; all of it where there is one rank."""

    name: str
    """Canonical Hugging Face name of the tensor."""
    dtype: str
    shape: Shape
    """Of the whole tensor."""
    start: Shape
    size: Shape
    data: NDArray[np.uint8]
    """Bytes of the box in row-major order."""


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A run of a slice's memory, and the same run at the base's version, where that has it."""

    dtype: str
    shape: Shape
    box: Box
    """Its tensor is the slice's place in the list."""
    new: NDArray[np.uint8]
    old: NDArray[np.uint8] | None


class Encoded(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Parts as they travel."""

    boxes: tuple[Box, ...]
    encoding: str
    data: bytes | memoryview
    sums: tuple[Sums, ...]
    """What each box adds to its tensor's digest; where it has old bytes, what it adds to the digest of the base."""


def slices(tensors: Mapping[str, FlatTensor]) -> list[Slice]:
    """Return whole tensors as slices."""
    return [
        Slice(
            name=name, dtype=flat.dtype, shape=flat.shape, start=(0,) * len(flat.shape), size=flat.shape, data=flat.data
        )
        for name, flat in tensors.items()
    ]


def groups(new: Sequence[Slice], base: Sequence[Slice] | None) -> Iterator[list[Part]]:
    """Yield parts that are coded together: large slices are cut, small ones of one dtype share a tile.

    The parameters of a code are paid for once per tile, and memory is bounded by the size of a group.
    """
    group: list[Part] = []
    held = 0
    for one in _parts(new, base or ()):
        alike = group and (group[0].dtype, group[0].old is None) == (one.dtype, one.old is None)
        if group and not (alike and held + one.new.size <= _most_elements(one.dtype) * LAYOUTS[one.dtype].width):
            yield group
            group, held = [], 0
        group.append(one)
        held += one.new.size
    if group:
        yield group


def encode_group(group: Sequence[Part], *, difference: Difference = RICE_ULP) -> Encoded:
    """Return parts as a difference to their old bytes, or standing alone where they have none."""
    new = joined([one.new for one in group])
    olds = [one.old for one in group if one.old is not None]
    old = joined(olds) if olds else None
    encoding, packed = encode(new, old, dtype=group[0].dtype, difference=difference)
    return Encoded(boxes=tuple(one.box for one in group), encoding=encoding, data=packed, sums=tuple(map(_sums, group)))


def joined(pieces: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the bytes one after the other; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _parts(new: Sequence[Slice], base: Sequence[Slice]) -> Iterator[Part]:
    older = {place_of(one): one for one in base}
    for index, one in enumerate(new):
        if not one.data.size:
            continue
        before = older.get(place_of(one))
        width, begin = LAYOUTS[one.dtype].width, 0
        for start, size in slabs(one.size, _most_elements(one.dtype)):
            end = begin + int(np.prod(size, dtype=np.int64)) * width
            yield Part(
                dtype=one.dtype,
                shape=one.shape,
                box=Box(index, tuple(map(sum, zip(one.start, start, strict=True))), size),
                new=one.data[begin:end],
                old=None if before is None else before.data[begin:end],
            )
            begin = end


def place_of(one: Slice) -> tuple[str, str, Shape, Shape, Shape]:
    """Return what a slice is a slice of; equal for two versions of the same box."""
    return (one.name, one.dtype, one.shape, one.start, one.size)


def _most_elements(dtype: str) -> int:
    return min(MAX_TILE, MAX_GROUP_BYTES // LAYOUTS[dtype].width)


def _sums(one: Part) -> Sums:
    begins, run = runs(one.box, one.shape)
    width = LAYOUTS[one.dtype].width
    if one.old is None:
        return sums_of_runs(one.new, width=width, begins=begins, run=run)
    return sums_of_changed_runs(one.old, one.new, width=width, begins=begins, run=run)
