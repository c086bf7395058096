# pyright: basic
"""Elements of every dtype before and after a training step."""

import numpy as np
import torch
from hypothesis import strategies as st

from etude.weights.tensors import DTYPES, flatten
from etude.weights.ulp import LAYOUTS


@st.composite
def changes(draw):
    """A dtype, old elements of every kind, and new ones of which some moved by little, by much or to anything."""
    dtype = draw(st.sampled_from(sorted(LAYOUTS)))
    unsigned = LAYOUTS[dtype].unsigned
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([0, 1, 2, 3, 7, 8, 9, 63, 200, 1025, 5000]))
    old = rng.integers(0, 256, size * unsigned.itemsize, dtype=np.uint8)
    if dtype in ("BF16", "F32", "F16", "F8_E4M3") and draw(st.booleans()):
        old = flatten(torch.from_numpy(rng.standard_normal(size) * 0.02).to(DTYPES[dtype])).data
    new = old.copy()
    moved = np.flatnonzero(rng.random(size) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.24, 0.26, 0.6, 1.0])))
    elements = new.view(unsigned)
    how = draw(st.sampled_from(["a step", "some steps", "anything"]))
    if how == "anything":
        elements[moved] = rng.integers(0, 256, moved.size * unsigned.itemsize, dtype=np.uint8).view(unsigned)
    else:
        reach = 1 if how == "a step" else 90
        elements[moved] += rng.integers(-reach, reach + 1, moved.size).astype(np.int8).astype(unsigned)
    return dtype, old, new
