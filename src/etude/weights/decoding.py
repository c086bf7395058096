"""Objects of a manifest turned into the bytes of tensors, piece by piece, each checked before and after."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic

import msgspec

from etude.errors import IntegrityError
from etude.weight_types import Box, Manifest, TensorEntry
from etude.weights.boxes import part, put
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.codec import DIFFERENCES, decode
from etude.weights.kernels import T
from etude.weights.manifests import box_bytes, object_sizes, piece_bytes, tensor_bytes
from etude.weights.memory import HOST, Memory
from etude.weights.tensors import Flat, FlatTensor
from etude.weights.ulp import LAYOUTS

BaseOf = Callable[[TensorEntry, Box], T]
"""Returns the bytes of a box at the base's version. They are copied before anything changes them."""


class Decoded(msgspec.Struct, Generic[T], frozen=True, kw_only=True, eq=False):
    """A box of a tensor at the manifest's version."""

    entry: TensorEntry
    box: Box
    data: T
    """Its elements in row-major order, in memory of their own."""
    has_hashes: bool
    """Of what it is to become; otherwise only the tensor's digest can tell that it was made from the right base."""


def decode_object(
    manifest: Manifest, name: str, data: bytes, base_of: BaseOf[T], *, memory: Memory[T], keys: ChainKeys = WEIGHTS
) -> Iterator[Decoded[T]]:
    """Yield the boxes that an object holds, which was checked against its name.

    Raise `IntegrityError` when a piece is not what a writer makes or was made for another base.
    """
    for piece in manifest.pieces:
        if piece.object != name:
            continue
        boxes = [(manifest.tensors[box.tensor], box) for box in piece.boxes]
        dtype, num_bytes = boxes[0][0].dtype, piece_bytes(manifest, piece)
        weights = (
            memory.joined([base_of(entry, box) for entry, box in boxes])
            if piece.encoding in DIFFERENCES
            else memory.empty(num_bytes)
        )
        key = keys.object(manifest.lineage, name)
        place = f"version {manifest.version}, {_names(boxes)}: object {key}, bytes from {piece.offset}"
        packed = memoryview(data)[piece.offset : piece.offset + piece.length]
        kernels = memory.kernels(num_bytes // LAYOUTS[dtype].width)
        has_hashes = decode(piece.encoding, packed, weights=weights, dtype=dtype, place=place, kernels=kernels)
        begin = 0
        for entry, box in boxes:
            end = begin + box_bytes(manifest, box)
            yield Decoded(entry=entry, box=box, data=weights[begin:end], has_hashes=has_hashes)
            begin = end


class Staging(Generic[T]):
    """Weights on their way to a version. What they started from stays untouched, and nobody sees what is in between."""

    def __init__(self, base: Mapping[str, Flat[T]], *, memory: Memory[T], keys: ChainKeys = WEIGHTS) -> None:
        """Start from the weights of a version, or from none for an anchor."""
        self._keys = keys
        self._memory = memory
        self._base = dict(base)
        self._next: dict[str, Flat[T]] = {}
        self._manifest: Manifest | None = None

    def begin(self, manifest: Manifest) -> None:
        """Make room for the manifest's version: its own for the first one, over which later ones are written."""
        self._next = {entry.name: self._room(entry) for entry in manifest.tensors}

    def add(self, manifest: Manifest, name: str, data: bytes) -> None:
        """Take an object of the manifest."""
        for found in decode_object(manifest, name, data, self._bytes, memory=self._memory, keys=self._keys):
            put(self._next[found.entry.name].data, found.entry.shape, found.box, found.data)

    def end(self, manifest: Manifest) -> None:
        """The version is complete, and is what the next one differs from."""
        self._base, self._next, self._manifest = self._next, {}, manifest

    def result(self) -> dict[str, Flat[T]]:
        """Return all tensors of the version that was ended last, each checked against its digest."""
        assert self._manifest is not None
        for entry in self._manifest.tensors:
            check_digest(self._manifest, entry, self._memory.digest(self._base[entry.name].data, entry.dtype))
        return self._base

    def _room(self, entry: TensorEntry) -> Flat[T]:
        own = self._base.get(entry.name) if self._manifest is not None else None
        # Boxes do not overlap, and each is read before it is written.
        if own is not None and (own.dtype, own.shape) == (entry.dtype, entry.shape):
            return own
        return Flat(dtype=entry.dtype, shape=entry.shape, data=self._memory.empty(tensor_bytes(entry)))

    def _bytes(self, entry: TensorEntry, box: Box) -> T:
        older = self._base.get(entry.name)
        if older is None or (older.dtype, older.shape) != (entry.dtype, entry.shape):
            msg = f"a difference to a tensor {entry.name!r} that its base lacks is refused; start a new lineage"
            raise IntegrityError(msg)
        return part(older.data, entry.shape, box)


def apply(
    manifest: Manifest, objects: Mapping[str, bytes], base: Mapping[str, FlatTensor], *, keys: ChainKeys = WEIGHTS
) -> dict[str, FlatTensor]:
    """Return all tensors of a version from all its objects, verified, and those of the version before it."""
    staging = Staging(base, memory=HOST, keys=keys)
    staging.begin(manifest)
    for name in objects_of(manifest):
        staging.add(manifest, name, objects[name])
    staging.end(manifest)
    return staging.result()


def check_digest(manifest: Manifest, entry: TensorEntry, digest: str) -> None:
    """Raise `IntegrityError` unless a tensor has the digest that the manifest says."""
    if digest != entry.digest:
        msg = (
            f"tensor {entry.name!r} of version {manifest.version} has another digest than its manifest says; "
            f"the weights it was applied to are damaged: load from the anchor"
        )
        raise IntegrityError(msg)


def objects_of(manifest: Manifest) -> dict[str, int]:
    """Return name and size of the manifest's objects in the order in which its pieces name them."""
    sizes = object_sizes(manifest)
    return {name: sizes[name] for name in dict.fromkeys(piece.object for piece in manifest.pieces)}


def _names(boxes: list[tuple[TensorEntry, Box]]) -> str:
    names = list(dict.fromkeys(entry.name for entry, _ in boxes))
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")  # noqa: PLR2004
