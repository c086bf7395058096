"""All tensors of a version into one object and the manifest that describes it."""

from collections.abc import Mapping

from etude.types import Manifest, TensorEntry
from etude.weights.codec import encode
from etude.weights.digest import object_name, tensor_digest, version_digest
from etude.weights.reader import LoadedVersion
from etude.weights.tensors import FlatTensor


def pack(
    tensors: Mapping[str, FlatTensor], *, lineage: str, version: int, step: int, base: LoadedVersion | None
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest of a version and its objects by name: differences to `base`, an anchor when there is none."""
    packed = {name: _encode(tensor, base.tensors.get(name) if base else None) for name, tensor in tensors.items()}
    data = b"".join(part for _, part in packed.values())
    name_of_object = object_name(data)
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        encoding, part = packed[name]
        entries.append(
            TensorEntry(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                digest=tensor_digest(tensor.data),
                object=name_of_object,
                offset=offset,
                length=len(part),
                encoding=encoding,
            )
        )
        offset += len(part)
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


def _encode(tensor: FlatTensor, older: FlatTensor | None) -> tuple[str, bytes | memoryview]:
    comparable = older is not None and (older.dtype, older.shape) == (tensor.dtype, tensor.shape)
    return encode(tensor.data, older.data if older is not None and comparable else None)
