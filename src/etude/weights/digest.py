"""Names for bytes: what was published is what is loaded."""

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.types import TensorEntry


def tensor_digest(data: NDArray[np.uint8]) -> str:
    """Return the xxh3-128 of a tensor's bytes: fast, and enough against accidents once objects carry a sha256."""
    return xxhash.xxh3_128_hexdigest(data.data)


def object_name(data: bytes) -> str:
    """Return the sha256 of an object: what it is stored under and checked against."""
    return hashlib.sha256(data).hexdigest()


def version_digest(entries: Iterable[TensorEntry]) -> str:
    """Return the sha256 over all tensors' names, dtypes, shapes and digests, whatever their order."""
    facts = sorted((entry.name, entry.dtype, entry.shape, entry.digest) for entry in entries)
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
