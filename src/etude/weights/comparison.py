"""What changed between two versions."""

from collections.abc import Mapping

import msgspec
import numpy as np

from etude.weights.tensors import FlatTensor
from etude.weights.ulp import LAYOUTS, steps

_CHUNK = 1 << 22
_EDGES = (1, 2, 8)
"""Distances up to which changes are counted together; beyond the last one they are far."""


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    by_1: int = 0
    """Elements that moved by one unit in the last place."""
    by_2: int = 0
    by_8: int = 0
    """By 3 to 8."""
    by_more: int = 0
    kind: str = "changed"
    """Or `added`, `removed`, `reshaped` when there is nothing to compare with."""

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


def compare(old: Mapping[str, FlatTensor], new: Mapping[str, FlatTensor]) -> list[TensorChange]:
    """Return how each tensor changed that did, by name."""
    changes = [_compare(name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())]
    return [change for change in changes if change.changed]


def _compare(name: str, old: FlatTensor | None, new: FlatTensor | None) -> TensorChange:
    known = new or old
    assert known is not None
    size = known.data.size // LAYOUTS[known.dtype].width
    if old is None or new is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        kind = "added" if old is None else "removed" if new is None else "reshaped"
        return TensorChange(
            name=name, dtype=known.dtype, shape=known.shape, elements=size, changed=max(1, size), kind=kind
        )
    layout = LAYOUTS[new.dtype]
    before, after = layout.view(old.data), layout.view(new.data)
    counts = np.zeros(len(_EDGES) + 1, np.int64)
    for begin in range(0, size, _CHUNK):
        distances = steps(before[begin : begin + _CHUNK], after[begin : begin + _CHUNK], layout)
        # Modulo 2^bits: a step down by one is the largest number there is.
        far = np.minimum(distances, 0 - distances)
        counts += np.bincount(np.searchsorted(_EDGES, far[far > 0]), minlength=len(_EDGES) + 1)
    by_1, by_2, by_8, by_more = counts.tolist()
    return TensorChange(
        name=name,
        dtype=new.dtype,
        shape=new.shape,
        elements=size,
        changed=int(counts.sum()),
        by_1=by_1,
        by_2=by_2,
        by_8=by_8,
        by_more=by_more,
    )
