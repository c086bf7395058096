"""What a version is made of: manifests that are safe to work with, and what they say of objects."""

import hashlib
import math
import re
from collections.abc import Mapping

import msgspec
import numpy as np

from etude.errors import IntegrityError
from etude.weight_types import Box, Manifest, Piece, TensorEntry
from etude.weights.bits import compress, decompress, frame_size
from etude.weights.boxes import make_up
from etude.weights.chain import WEIGHTS, ChainKeys, check_lineage, decode_record, is_sha256, require
from etude.weights.codec import DIFFERENCES, ENCODINGS, RAW
from etude.weights.digest import version_digest
from etude.weights.ulp import LAYOUTS

MAX_MANIFEST_BYTES = 64 << 20
"""As it is stored, and also uncompressed."""
MAX_PIECE_BYTES = 64 << 20
"""Of the boxes of one piece, once decoded: a reader works piece by piece."""
MAX_OBJECT_BYTES = 256 << 20
_MAX_BOXES = 1 << 20
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 40
"""Elements along one dimension, and bytes of one tensor."""
_ADVICE = "restore it, or start a new lineage"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,511}")
_TENSOR_DIGEST = re.compile(r"[0-9a-f]{32}")


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Return a manifest's bytes, compressed JSON, and their sha256.

    Uncompressed it would be a fifth of a small model's difference.
    """
    data = compress(np.frombuffer(msgspec.json.encode(manifest), np.uint8))
    return data, hashlib.sha256(data).hexdigest()


def parse_manifest(
    data: bytes, *, lineage: str, version: int, digest: str, max_bytes: int, keys: ChainKeys = WEIGHTS
) -> Manifest:
    """Return the manifest of a version whose tensors have at most `max_bytes` in all; `digest` is its sha256.

    Raise `IntegrityError` when it is another one, contradicts itself or could harm a reader. Memory and time are
    bounded by its size, and that by `MAX_MANIFEST_BYTES`.
    """
    place = keys.manifest(lineage, version, digest)
    require(hashlib.sha256(data).hexdigest() == digest, place, "its bytes are not those of its name; fetch it again")
    manifest = decode_record(_uncompressed(data, place), Manifest, place, advice=_ADVICE)
    require((manifest.lineage, manifest.version) == (lineage, version), place, "it describes another version")
    require(manifest.epoch >= 1, place, "the epoch is out of range")
    require(manifest.base is None or 0 <= manifest.base < version, place, "its base is not an older version")
    if manifest.parent is not None:
        check_lineage(manifest.parent.lineage, place)
        require(manifest.parent.version >= 0 and is_sha256(manifest.parent.digest), place, "its parent is no version")
    require(not manifest.source or is_sha256(manifest.source), place, "its source is no version")
    require(len({entry.name for entry in manifest.tensors}) == len(manifest.tensors), place, "a name appears twice")
    total = 0
    for entry in manifest.tensors:
        _check_entry(entry, place)
        total += tensor_bytes(entry)
    require(
        total <= max_bytes,
        place,
        f"its tensors have {total} bytes, more than the {max_bytes} allowed here",
    )
    for piece in manifest.pieces:
        _check_piece(piece, manifest, place)
    _check_cover(manifest, place)
    _sizes(manifest, place)
    require(version_digest(manifest.tensors) == manifest.digest, place, "its digest does not fit its tensors")
    return manifest


def _uncompressed(data: bytes, place: str) -> bytes:
    try:
        size = frame_size(memoryview(data))
        require(size <= MAX_MANIFEST_BYTES, place, f"its {size} bytes are too many")
        return decompress(memoryview(data), size)
    except IntegrityError as error:
        msg = f"{place} is refused: {error}; fetch it again"
        raise IntegrityError(msg) from error


def tensor_bytes(entry: TensorEntry) -> int:
    """Return the size of a tensor once decoded."""
    return math.prod(entry.shape) * LAYOUTS[entry.dtype].width


def box_bytes(manifest: Manifest, box: Box) -> int:
    """Return the size of a box once decoded."""
    return math.prod(box.shape) * LAYOUTS[manifest.tensors[box.tensor].dtype].width


def piece_bytes(manifest: Manifest, piece: Piece) -> int:
    """Return the size of a piece's boxes once decoded."""
    return sum(box_bytes(manifest, box) for box in piece.boxes)


def object_sizes(manifest: Manifest) -> Mapping[str, int]:
    """Return name and exact size of every object of a parsed manifest."""
    return _sizes(manifest, "")


def _check_entry(entry: TensorEntry, place: str) -> None:
    place = f"{place}, tensor {entry.name[:80]!r}"
    plain = _NAME.fullmatch(entry.name) is not None and ".." not in entry.name.split("/")
    require(
        plain, place, "the name is not a plain one: letters, digits and _./- of which a letter, digit or _ is first"
    )
    require(entry.name != "__metadata__", place, "safetensors has another meaning for this name; rename the tensor")
    require(entry.dtype in LAYOUTS, place, f"dtype {entry.dtype[:20]!r} is unknown")
    require(len(entry.shape) <= _MAX_DIMENSIONS, place, "too many dimensions")
    require(all(0 <= size <= _MAX_SIZE for size in entry.shape), place, "a dimension is out of range")
    size = tensor_bytes(entry)
    require(size <= _MAX_SIZE, place, f"{size} bytes are too many for one tensor")
    require(_TENSOR_DIGEST.fullmatch(entry.digest) is not None, place, "the digest is not 32 hexadecimal digits")


def _check_piece(piece: Piece, manifest: Manifest, place: str) -> None:
    require(is_sha256(piece.object), place, "the name of an object is not a sha256")
    place = f"{place}, object {piece.object}, bytes from {piece.offset}"
    require(piece.encoding in ENCODINGS, place, f"encoding {piece.encoding[:20]!r} is unknown: update this reader")
    alone = manifest.base is None and piece.encoding in DIFFERENCES
    require(not alone, place, "an anchor holds a difference")
    require(len(piece.boxes) > 0, place, "it holds nothing")
    size = 0
    for box in piece.boxes:
        require(0 <= box.tensor < len(manifest.tensors), place, f"there is no tensor {box.tensor}")
        shape = manifest.tensors[box.tensor].shape
        require(len(box.start) == len(box.shape) == len(shape), place, "a box has other dimensions than its tensor")
        edges = zip(box.start, box.shape, shape, strict=True)
        inside = all(begin >= 0 and 0 < size <= whole - begin for begin, size, whole in edges)
        require(inside, place, "a box is empty or reaches beyond its tensor")
        size += box_bytes(manifest, box)
    dtypes = {manifest.tensors[box.tensor].dtype for box in piece.boxes}
    require(len(dtypes) == 1, place, "tensors of several dtypes are coded together")
    require(size <= MAX_PIECE_BYTES, place, f"its {size} bytes are too many for one piece")
    fits = piece.length == size if piece.encoding == RAW else 0 < piece.length < size
    require(fits, place, "its span does not fit its boxes")


def _check_cover(manifest: Manifest, place: str) -> None:
    count = sum(len(piece.boxes) for piece in manifest.pieces)
    require(count <= _MAX_BOXES, place, f"{count} boxes are more than the {_MAX_BOXES} allowed")
    boxes: dict[int, list[Box]] = {}
    for piece in manifest.pieces:
        for box in piece.boxes:
            boxes.setdefault(box.tensor, []).append(box)
    for index, entry in enumerate(manifest.tensors):
        try:
            complete = make_up(boxes.get(index, []), entry.shape)
        except ValueError as error:
            msg = f"{place}, tensor {entry.name!r} is refused: {error}"
            raise IntegrityError(msg) from error
        require(complete, f"{place}, tensor {entry.name!r}", "its boxes overlap, or leave elements out")


def _sizes(manifest: Manifest, place: str) -> dict[str, int]:
    """Spans fill an object edge to edge; the same one may be named again, where two tensors are equal."""
    sizes: dict[str, int] = {}
    for name, offset, length in sorted({(piece.object, piece.offset, piece.length) for piece in manifest.pieces}):
        end = sizes.get(name, 0)
        require(offset == end, place, f"a piece leaves a gap or overlaps another in object {name}")
        sizes[name] = end + length
        require(sizes[name] <= MAX_OBJECT_BYTES, place, f"object {name} is too large")
    return sizes
