"""The chain of versions: where its parts lie, what a valid part looks like, which parts a reader needs.

Objects are written before the manifest that names them and the manifest before the head, so whatever the head names is
there. Nothing here does I/O.
"""

import math
import re
from collections.abc import Iterator
from itertools import groupby
from typing import TypeVar

import msgspec

from etude.errors import IntegrityError
from etude.types import Head, Manifest, TensorEntry
from etude.weights.codec import DIFFERENCES, ENCODINGS, RAW
from etude.weights.digest import version_digest
from etude.weights.tensors import DTYPES

HEAD_KEY = "weights/head"
FORMAT = 1
MAX_HEAD_BYTES = 4096
MAX_MANIFEST_BYTES = 64 << 20
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 40
"""Elements along one dimension, and bytes of one tensor."""
_LINEAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,511}")
_TENSOR_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Record = TypeVar("_Record", Head, Manifest)


def manifest_key(lineage: str, version: int) -> str:
    """Return where the manifest of a version lies."""
    return f"weights/{lineage}/manifests/{version}.json"


def object_key(lineage: str, name: str) -> str:
    """Return where an object lies; its name is the sha256 of its bytes."""
    return f"weights/{lineage}/objects/{name}"


def parse_head(data: bytes) -> Head:
    """Return the head; raise `IntegrityError` when it is not a valid one."""
    head = _decode(data, Head, HEAD_KEY)
    _require(head.format == FORMAT, HEAD_KEY, f"format {head.format} is not {FORMAT}: update this reader")
    check_lineage(head.lineage)
    _require(0 <= head.anchor <= head.version, HEAD_KEY, "the anchor is newer than the version")
    _require(_matches(_SHA256, head.digest), HEAD_KEY, "the digest is not a sha256")
    return head


def check_lineage(lineage: str) -> str:
    """Return the lineage, or raise `IntegrityError` when it is no plain name."""
    _require(_matches(_LINEAGE, lineage), HEAD_KEY, f"lineage {lineage[:80]!r} is not a plain name")
    return lineage


def parse_manifest(data: bytes, *, lineage: str, version: int, max_bytes: int) -> Manifest:
    """Return the manifest of a version whose tensors have at most `max_bytes` in all.

    Raise `IntegrityError` when it is of another version, contradicts itself or could harm a reader.
    """
    place = manifest_key(lineage, version)
    manifest = _decode(data, Manifest, place)
    _require(manifest.format == FORMAT, place, f"format {manifest.format} is not {FORMAT}: update this reader")
    _require((manifest.lineage, manifest.version) == (lineage, version), place, "it describes another version")
    _require(manifest.base is None or 0 <= manifest.base < version, place, "its base is not an older version")
    _require(len({entry.name for entry in manifest.tensors}) == len(manifest.tensors), place, "a name appears twice")
    for entry in manifest.tensors:
        _check_entry(entry, place, anchor=manifest.base is None)
    for span in spans(manifest):
        _check_span(span, f"{place}, tensor {span.entries[0].name[:80]!r}")
    total = sum(tensor_bytes(entry) for entry in manifest.tensors)
    _require(total <= max_bytes, place, f"its tensors have {total} bytes, more than the {max_bytes} allowed here")
    object_sizes(manifest)
    _require(version_digest(manifest.tensors) == manifest.digest, place, "its digest does not fit its tensors")
    return manifest


def tensor_bytes(entry: TensorEntry) -> int:
    """Return the size of a tensor once decoded."""
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an object with the tensors that are coded in it, one after the other."""

    object: str
    offset: int
    length: int
    encoding: str
    entries: list[TensorEntry]
    """One; or several of one dtype that are coded together, because tiny tiles cost more than they hold."""

    @property
    def size(self) -> int:
        """Bytes of the tensors once decoded."""
        return sum(tensor_bytes(entry) for entry in self.entries)


def spans(manifest: Manifest) -> Iterator[Span]:
    """Yield the spans of a manifest; neighbours that name the same span of an object share it."""
    for _, run in groupby(manifest.tensors, key=_place_of):
        entries = list(run)
        first = entries[0]
        yield Span(
            object=first.object,
            offset=first.offset,
            length=first.length,
            encoding=first.encoding,
            entries=entries,
        )


def object_sizes(manifest: Manifest) -> dict[str, int]:
    """Return name and exact size of every object; raise `IntegrityError` unless its tensors fill it edge to edge."""
    sizes: dict[str, int] = {}
    for span in sorted(spans(manifest), key=lambda span: (span.object, span.offset, span.length)):
        end = sizes.get(span.object, 0)
        place = manifest_key(manifest.lineage, manifest.version)
        name = span.entries[0].name
        _require(span.offset == end, place, f"tensor {name!r} leaves a gap or overlaps another in its object")
        sizes[span.object] = end + span.length
    return sizes


def needed_before(manifest: Manifest, held: tuple[str, int, str] | None) -> int | None:
    """Return the version that a reader needs first, or None when the manifest applies as it is.

    `held` is lineage, version and digest of the reader's weights. Walking back from the newest version this way ends at
    what the reader holds or at the newest anchor, whichever comes first.
    """
    if manifest.base is None:
        return None
    return None if held == (manifest.lineage, manifest.base, manifest.base_digest) else manifest.base


def check_link(older: Manifest, newer: Manifest) -> None:
    """Raise `IntegrityError` unless `newer` is a difference to exactly `older`."""
    fits = (newer.base, newer.base_digest) == (older.version, older.digest)
    _require(fits, manifest_key(newer.lineage, newer.version), f"it does not continue version {older.version}")


def _check_entry(entry: TensorEntry, place: str, *, anchor: bool) -> None:
    place = f"{place}, tensor {entry.name[:80]!r}"
    _require(_matches(_NAME, entry.name), place, "the name is not a plain one")
    _require(entry.dtype in DTYPES, place, f"dtype {entry.dtype[:20]!r} is unknown")
    _require(len(entry.shape) <= _MAX_DIMENSIONS, place, "too many dimensions")
    _require(all(0 <= size <= _MAX_SIZE for size in entry.shape), place, "a dimension is out of range")
    size = tensor_bytes(entry)
    _require(size <= _MAX_SIZE, place, f"{size} bytes are too many for one tensor")
    _require(_matches(_TENSOR_DIGEST, entry.digest), place, "the digest is not an xxh3-128")
    _require(_matches(_SHA256, entry.object), place, "the object's name is not a sha256")
    _require(entry.encoding in ENCODINGS, place, f"encoding {entry.encoding[:20]!r} is unknown: update this reader")
    _require(not (anchor and entry.encoding in DIFFERENCES), place, "an anchor holds a difference")
    _require(entry.offset >= 0, place, "its span does not fit its shape")


def _check_span(span: Span, place: str) -> None:
    fits = span.length == span.size if span.encoding == RAW else 0 < span.length < span.size
    _require(fits, place, "its span does not fit its shape")
    _require(len({entry.dtype for entry in span.entries}) == 1, place, "it shares a span with another dtype")


def _place_of(entry: TensorEntry) -> tuple[str | int, ...]:
    """Raw tensors stand alone, and may be empty where another begins."""
    alone = entry.name if entry.encoding == RAW else ""
    return (entry.object, entry.offset, entry.length, entry.encoding, alone)


def _decode(data: bytes, kind: type[_Record], place: str) -> _Record:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{place} is damaged: {error}; restore it, or start a new lineage"
        raise IntegrityError(msg) from error


def _matches(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def _require(holds: bool, place: str, what: str) -> None:  # noqa: FBT001 - the condition is the point
    if not holds:
        msg = f"{place} is refused: {what}"
        raise IntegrityError(msg)
