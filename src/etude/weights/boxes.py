"""Parts of a tensor with edges along its axes: where their elements lie, and whether they make up the whole."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from etude.weight_types import Box
from etude.weights.kernels import T

Shape = tuple[int, ...]

MAX_AXES_CUT = 3
"""Of one tensor: experts, ranks and slabs. Bounds memory and time of `make_up`, whatever a manifest claims."""


def whole(tensor: int, shape: Shape) -> Box:
    """Return the box that is all of a tensor."""
    return Box(tensor, (0,) * len(shape), shape)


def slabs(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield start and shape of boxes of at most `most` elements, each one run in memory, that make up a tensor."""
    size, axis = math.prod(shape), 0
    while size > most:
        size //= shape[axis]
        axis += 1
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    cut = axis - 1
    count = -(-shape[cut] // (most // size))
    step = -(-shape[cut] // count)
    for outer in itertools.product(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], step):
            start = (*outer, begin, *(0 for _ in shape[axis:]))
            yield start, (*(1 for _ in outer), min(step, shape[cut] - begin), *shape[axis:])


def runs(box: Box, shape: Shape) -> tuple[NDArray[np.uint64], int]:
    """Return where in a tensor the runs of neighbouring elements of a box begin, and how long each is."""
    run, stride, axis = 1, 1, len(shape)
    while axis:
        axis -= 1
        run *= box.shape[axis]
        stride *= shape[axis]
        if box.shape[axis] != shape[axis]:
            break
    # `stride` is now the distance between two neighbours along the axis before.
    begin, begins = 0, np.zeros(1, np.uint64)
    step = 1
    for place in reversed(range(len(shape))):
        begin += box.start[place] * step
        step *= shape[place]
    for place in reversed(range(axis)):
        along = np.arange(box.shape[place], dtype=np.uint64) * np.uint64(stride)
        begins = (along[:, None] + begins).reshape(-1)
        stride *= shape[place]
    return begins + np.uint64(begin), run


def part(data: T, shape: Shape, box: Box) -> T:
    """Return the bytes of a box of a tensor in row-major order, sharing the tensor's memory where they are one run."""
    width = len(data) // math.prod(shape)
    begins, run = runs(box, shape)
    if begins.size == 1:
        begin = int(begins[0]) * width
        return data[begin : begin + run * width]
    return data.reshape(*shape, width)[_along(box)].reshape(-1)


def put(data: T, shape: Shape, box: Box, elements: T) -> None:
    """Write the bytes of a box, in row-major order, into a tensor's."""
    width = len(data) // math.prod(shape)
    data.reshape(*shape, width)[_along(box)] = elements.reshape(*box.shape, width)


def _along(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(box.start, box.shape, strict=True))


def make_up(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether non-empty boxes within a tensor cover each of its elements exactly once.

    How often an element is covered is a sum of steps, one up or down at each corner of each box. It is 1 throughout
    if and only if all steps cancel except those at the corners of the whole. Raise `ValueError` when they are cut along
    more than `MAX_AXES_CUT` axes.
    """
    if sum(math.prod(box.shape) for box in boxes) != math.prod(shape):
        return False
    cut = [axis for axis in range(len(shape)) if any(box.shape[axis] != shape[axis] for box in boxes)]
    if not cut:
        return True
    if len(cut) > MAX_AXES_CUT:
        msg = f"its boxes are cut along {len(cut)} axes; {MAX_AXES_CUT} are allowed"
        raise ValueError(msg)
    everything = Box(0, (0,) * len(shape), shape)
    starts, sizes = (
        np.array([[getattr(box, name)[axis] for axis in cut] for box in (everything, *boxes)], np.int64)
        for name in ("start", "shape")
    )
    places, steps = np.zeros((len(boxes) + 1, 1), np.int64), np.ones((len(boxes) + 1, 1), np.int64)
    steps[0] = -1
    for column, axis in enumerate(cut):
        edges = np.stack([starts[:, column], starts[:, column] + sizes[:, column]], axis=1)
        places = (places[:, :, None] * (shape[axis] + 1) + edges[:, None, :]).reshape(len(places), -1)
        steps = (steps[:, :, None] * np.array([1, -1])).reshape(len(steps), -1)
    order = np.argsort(places, axis=None, kind="stable")
    corners, up = places.reshape(-1)[order], steps.reshape(-1)[order]
    firsts = np.flatnonzero(np.diff(corners, prepend=-1))
    return not np.add.reduceat(up, firsts).any()
