"""A version out of the store: fetched, verified, then decoded, in this order."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.types import Head, Manifest
from etude.weights.chain import (
    HEAD_KEY,
    MAX_HEAD_BYTES,
    MAX_MANIFEST_BYTES,
    Span,
    check_link,
    manifest_key,
    needed_before,
    object_key,
    object_sizes,
    parse_head,
    parse_manifest,
    spans,
    tensor_bytes,
)
from etude.weights.codec import DIFFERENCES, decode
from etude.weights.digest import object_name, tensor_digest
from etude.weights.tensors import FlatTensor

MAX_VERSION_BYTES = 64 << 30
"""Of all decoded tensors of one version."""


class LoadedVersion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All weights of one version, verified. Nobody writes to the tensors: they are the base of the next difference."""

    lineage: str
    version: int
    digest: str
    step: int
    tensors: dict[str, FlatTensor]


async def read_head(store: ObjectStore) -> Head | None:
    """Return the head, or None while nothing was published."""
    try:
        return parse_head(await store.get(HEAD_KEY, max_bytes=MAX_HEAD_BYTES))
    except ObjectMissingError:
        return None


async def load_head(
    store: ObjectStore, head: Head, *, held: LoadedVersion | None = None, max_bytes: int = MAX_VERSION_BYTES
) -> LoadedVersion:
    """Return the version that the head names, from the weights `held` where the chain allows it, else from its anchor.

    Raise `IntegrityError` when a part of the chain is not what its name, its manifest or the head says, and
    `StoreError` when one cannot be read. What is held stays untouched.
    """
    loaded = await load_version(
        store, lineage=head.lineage, version=head.version, oldest=head.anchor, held=held, max_bytes=max_bytes
    )
    if loaded.digest != head.digest:
        msg = f"{HEAD_KEY} names another digest than the manifest of version {head.version}; start a new lineage"
        raise IntegrityError(msg)
    return loaded


async def load_version(
    store: ObjectStore,
    *,
    lineage: str,
    version: int,
    oldest: int = 0,
    held: LoadedVersion | None = None,
    max_bytes: int = MAX_VERSION_BYTES,
) -> LoadedVersion:
    """Return one version of a lineage, which may be older than the head, such as the one an evaluation is pinned to.

    `oldest` is the anchor that the chain must not reach beyond. Errors as in `load_head`.
    """
    path = await _path(store, lineage=lineage, version=version, oldest=oldest, held=held, max_bytes=max_bytes)
    tensors: Mapping[str, FlatTensor] = held.tensors if held else {}
    for manifest in path:
        sizes = object_sizes(manifest)
        objects = {name: await store.get(object_key(lineage, name), max_bytes=sizes[name]) for name in sizes}
        tensors = await asyncio.to_thread(apply, manifest, objects, tensors)
    newest = path[-1]
    return LoadedVersion(
        lineage=lineage, version=version, digest=newest.digest, step=newest.step, tensors=dict(tensors)
    )


async def _path(
    store: ObjectStore, *, lineage: str, version: int, oldest: int, held: LoadedVersion | None, max_bytes: int
) -> Sequence[Manifest]:
    """Return the manifests to apply, oldest first."""
    mine = (held.lineage, held.version, held.digest) if held else None
    path: list[Manifest] = []
    wanted: int | None = version
    while wanted is not None:
        if wanted < oldest:
            msg = f"the chain of lineage {lineage} does not pass its anchor {oldest}; start a new lineage"
            raise IntegrityError(msg)
        data = await store.get(manifest_key(lineage, wanted), max_bytes=MAX_MANIFEST_BYTES)
        manifest = parse_manifest(data, lineage=lineage, version=wanted, max_bytes=max_bytes)
        if path:
            check_link(manifest, path[-1])
        path.append(manifest)
        wanted = needed_before(manifest, mine)
    return path[::-1]


def apply(manifest: Manifest, objects: Mapping[str, bytes], base: Mapping[str, FlatTensor]) -> dict[str, FlatTensor]:
    """Return all tensors of a version from its objects and the version before it, in memory of their own.

    Every object is checked against its name before a byte of it is decoded, every tensor against its digest after.
    """
    for name, data in objects.items():
        if object_name(data) != name:
            msg = f"object {object_key(manifest.lineage, name)} is damaged ({len(data)} bytes); fetch it again"
            raise IntegrityError(msg)
    tensors: dict[str, FlatTensor] = {}
    for span in spans(manifest):
        tensors.update(_tensors(manifest, span, objects[span.object], base))
    return tensors


def _tensors(
    manifest: Manifest, span: Span, data: bytes, base: Mapping[str, FlatTensor]
) -> Iterator[tuple[str, FlatTensor]]:
    names = ", ".join(entry.name for entry in span.entries[:2]) + (", ..." if len(span.entries) > 2 else "")  # noqa: PLR2004
    key = object_key(manifest.lineage, span.object)
    place = f"version {manifest.version}, {names}: object {key}, bytes from {span.offset}"
    weights = _base(span, base, place) if span.encoding in DIFFERENCES else np.empty(span.size, np.uint8)
    packed = memoryview(data)[span.offset : span.offset + span.length]
    decode(span.encoding, packed, weights=weights, dtype=span.entries[0].dtype, place=place)
    begin = 0
    for entry in span.entries:
        decoded = weights[begin : begin + tensor_bytes(entry)]
        begin += decoded.size
        if tensor_digest(decoded) != entry.digest:
            msg = (
                f"tensor {entry.name!r} of version {manifest.version} has another digest than its manifest says; "
                f"the weights it was applied to are damaged: load from the anchor"
            )
            raise IntegrityError(msg)
        yield entry.name, FlatTensor(dtype=entry.dtype, shape=entry.shape, data=decoded)


def _base(span: Span, base: Mapping[str, FlatTensor], place: str) -> NDArray[np.uint8]:
    """Return a copy of the bytes that a difference applies to."""
    pieces: list[NDArray[np.uint8]] = []
    for entry in span.entries:
        older = base.get(entry.name)
        if older is None or (older.dtype, older.shape) != (entry.dtype, entry.shape):
            msg = (
                f"{place} is refused: a difference to a tensor {entry.name!r} that its base lacks; start a new lineage"
            )
            raise IntegrityError(msg)
        pieces.append(older.data)
    return np.concatenate(pieces)
