"""All tensors of a version into one object and the manifest that describes it."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from etude.types import Manifest, TensorEntry
from etude.weights.codec import RAW, RICE_ULP, Difference, encode
from etude.weights.delta import MAX_TILE
from etude.weights.digest import object_name, tensor_digest, version_digest
from etude.weights.reader import LoadedVersion
from etude.weights.tensors import FlatTensor
from etude.weights.ulp import LAYOUTS

_Named = tuple[str, FlatTensor, FlatTensor | None]
"""A tensor, and itself at the base's version, where that has one of this shape."""


def pack(
    tensors: Mapping[str, FlatTensor],
    *,
    lineage: str,
    version: int,
    step: int,
    base: LoadedVersion | None,
    difference: Difference = RICE_ULP,
    workers: int = 1,
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest of a version and its objects by name: differences to `base`, an anchor when there is none.

    `difference` is how changes are coded, in `workers` threads.
    """
    parts: list[bytes | memoryview] = []
    placed: list[tuple[str, FlatTensor, int, int, str]] = []
    offset = 0
    for group in groups(tensors, base):
        for chunk, encoding, part in _encode(group, difference, workers):
            placed += [(name, tensor, offset, len(part), encoding) for name, tensor, _ in chunk]
            parts.append(part)
            offset += len(part)
    data = b"".join(parts)
    name_of_object = object_name(data)
    entries = [
        TensorEntry(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            digest=tensor_digest(tensor.data),
            object=name_of_object,
            offset=offset,
            length=length,
            encoding=encoding,
        )
        for name, tensor, offset, length, encoding in placed
    ]
    manifest = Manifest(
        lineage=lineage,
        version=version,
        base=base.version if base else None,
        base_digest=base.digest if base else "",
        digest=version_digest(entries),
        step=step,
        tensors=tuple(entries),
    )
    return manifest, {name_of_object: data}


def groups(tensors: Mapping[str, FlatTensor], base: LoadedVersion | None) -> Iterator[list[_Named]]:
    """Yield neighbours that one tile can hold: the parameters of a code are paid for once per tile."""
    group: list[_Named] = []
    held = 0
    for name, tensor in tensors.items():
        older = base.tensors.get(name) if base else None
        if older is not None and (older.dtype, older.shape) != (tensor.dtype, tensor.shape):
            older = None
        elements = tensor.data.size // LAYOUTS[tensor.dtype].width
        alike = group and (group[0][1].dtype, group[0][2] is None) == (tensor.dtype, older is None)
        if group and not (alike and held + elements <= MAX_TILE):
            yield group
            group, held = [], 0
        group.append((name, tensor, older))
        held += elements
    if group:
        yield group


def _encode(
    group: list[_Named], difference: Difference, workers: int
) -> Iterator[tuple[Sequence[_Named], str, bytes | memoryview]]:
    new = joined([tensor.data for _, tensor, _ in group])
    bases = [older.data for _, _, older in group if older is not None]
    old = joined(bases) if bases else None
    encoding, packed = encode(new, old, dtype=group[0][1].dtype, difference=difference, workers=workers)
    if encoding == RAW:
        yield from (([named], RAW, named[1].data.data) for named in group)
    else:
        yield group, encoding, packed


def joined(pieces: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the bytes one after the other; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
