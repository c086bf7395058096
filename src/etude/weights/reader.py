"""A version out of the store: fetched, verified, then decoded, in this order."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.types import Head, Manifest, TensorEntry
from etude.weights.chain import (
    HEAD_KEY,
    MAX_HEAD_BYTES,
    MAX_MANIFEST_BYTES,
    check_link,
    manifest_key,
    needed_before,
    object_key,
    object_sizes,
    parse_head,
    parse_manifest,
    tensor_bytes,
)
from etude.weights.codec import decode
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
    return {entry.name: _tensor(manifest, entry, objects[entry.object], base) for entry in manifest.tensors}


def _tensor(manifest: Manifest, entry: TensorEntry, data: bytes, base: Mapping[str, FlatTensor]) -> FlatTensor:
    older = base.get(entry.name) if manifest.base is not None else None
    if older is not None and (older.dtype, older.shape) != (entry.dtype, entry.shape):
        older = None
    packed = memoryview(data)[entry.offset : entry.offset + entry.length]
    decoded = decode(
        entry.encoding, packed, num_bytes=tensor_bytes(entry), base=older.data if older is not None else None
    )
    if tensor_digest(decoded) != entry.digest:
        msg = (
            f"tensor {entry.name!r} of version {manifest.version} has another digest than its manifest says; "
            f"the weights it was applied to are damaged: load from the anchor"
        )
        raise IntegrityError(msg)
    return FlatTensor(dtype=entry.dtype, shape=entry.shape, data=decoded)
