"""Names for bytes: what was published is what is loaded."""

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.policy.sum_hash import Sums, sums_of, sums_of_runs
from etude.weight_types import Box, TensorEntry
from etude.weights.boxes import runs
from etude.weights.ulp import LAYOUTS


def tensor_digest(data: NDArray[np.uint8], dtype: str) -> str:
    """Return the digest of a whole tensor's bytes: the sum over those of its boxes, however it is divided."""
    return sums_of(data, width=LAYOUTS[dtype].width).hex()


def box_sums(data: NDArray[np.uint8], *, dtype: str, shape: tuple[int, ...], box: Box) -> Sums:
    """Return what a box, given as its bytes in row-major order, adds to the digest of its tensor."""
    begins, run = runs(box, shape)
    return sums_of_runs(data, width=LAYOUTS[dtype].width, begins=begins, run=run)


def object_name(data: bytes | memoryview) -> str:
    """Return the sha256 of an object: what it is stored under and checked against."""
    return hashlib.sha256(data).hexdigest()


def version_digest(entries: Iterable[TensorEntry]) -> str:
    """Return the sha256 over all tensors' names, dtypes, shapes and digests, whatever their order."""
    facts = sorted((entry.name, entry.dtype, entry.shape, entry.digest) for entry in entries)
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
