"""A version out of the store: fetched, verified, then decoded, in this order."""

import asyncio
import heapq
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.types import Head, Manifest, PageName, Piece, Route
from etude.weights.boxes import part, put
from etude.weights.chain import MAX_HEAD_BYTES, WEIGHTS, ChainKeys, parse_head
from etude.weights.codec import DIFFERENCES, decode
from etude.weights.digest import object_name, tensor_digest
from etude.weights.manifests import (
    MAX_MANIFEST_BYTES,
    box_bytes,
    object_sizes,
    parse_manifest,
    piece_bytes,
    tensor_bytes,
)
from etude.weights.routes import MAX_PAGE_BYTES, parse_page
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


async def read_head(store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> Head | None:
    """Return the head, or None while nothing was published."""
    try:
        return parse_head(await store.get(keys.head, max_bytes=MAX_HEAD_BYTES), keys=keys)
    except ObjectMissingError:
        return None


async def load_head(
    store: ObjectStore,
    head: Head,
    *,
    held: LoadedVersion | None = None,
    max_bytes: int = MAX_VERSION_BYTES,
    keys: ChainKeys = WEIGHTS,
) -> LoadedVersion:
    """Return the version that the head names, from the weights `held` where the chain allows it, else from its anchor.

    Raise `IntegrityError` when a part of the chain is not what its name, its manifest or the head says, and
    `StoreError` when one cannot be read. What is held stays untouched.
    """
    loaded = await load_version(
        store, lineage=head.lineage, version=head.version, head=head, held=held, max_bytes=max_bytes, keys=keys
    )
    if loaded.digest != head.digest:
        msg = f"{keys.head} names another digest than the manifest of version {head.version}; start a new lineage"
        raise IntegrityError(msg)
    return loaded


async def load_version(
    store: ObjectStore,
    *,
    lineage: str,
    version: int,
    head: Head | None = None,
    held: LoadedVersion | None = None,
    max_bytes: int = MAX_VERSION_BYTES,
    keys: ChainKeys = WEIGHTS,
) -> LoadedVersion:
    """Return one version, which may be older than the head, such as the one an evaluation is pinned to.

    Errors as in `load_head`.
    """
    head = head or await read_head(store, keys=keys)
    if head is None:
        msg = f"{keys.head} does not exist, so no way to version {version} is known"
        raise ObjectMissingError(msg)
    page = PageName(head.lineage, head.routes)
    routes = await read_routes(store, page, lineage=lineage, since=held.version if held else 0, keys=keys)
    path = [
        await read_manifest(store, lineage, route, max_bytes=max_bytes, keys=keys)
        for route in _path(routes, version, held.version if held and held.lineage == lineage else None)
    ]
    tensors: Mapping[str, FlatTensor] = held.tensors if held else {}
    digest = held.digest if held else ""
    for manifest in path:
        if manifest.base is not None and manifest.base_digest != digest:
            msg = f"version {manifest.version} is a difference to other weights than those of version {manifest.base}"
            raise IntegrityError(msg)
        sizes = object_sizes(manifest)
        objects = {name: await store.get(keys.object(lineage, name), max_bytes=sizes[name]) for name in sizes}
        tensors = await asyncio.to_thread(apply, manifest, objects, tensors, keys=keys)
        digest = manifest.digest
    step = path[-1].step if path else held.step if held else 0
    return LoadedVersion(lineage=lineage, version=version, digest=digest, step=step, tensors=dict(tensors))


async def read_routes(
    store: ObjectStore, newest: PageName, *, lineage: str, since: int, keys: ChainKeys = WEIGHTS
) -> list[Route]:
    """Return all routes of a lineage to versions from `since` on, walking back from a page."""
    routes: list[Route] = []
    name: PageName | None = newest
    while name is not None:
        data = await store.get(keys.object(name.lineage, name.page), max_bytes=MAX_PAGE_BYTES)
        page = parse_page(data, lineage=name.lineage, digest=name.page, keys=keys)
        if page.lineage == lineage:
            routes = [*page.routes, *routes]
            if page.routes[0].version <= since:
                break
        elif routes:
            break
        name = page.older
    return routes


async def read_manifest(
    store: ObjectStore,
    lineage: str,
    route: Route,
    *,
    max_bytes: int = MAX_VERSION_BYTES,
    keys: ChainKeys = WEIGHTS,
) -> Manifest:
    """Return the manifest of a route."""
    key = keys.manifest(lineage, route.version, route.manifest)
    data = await store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    return parse_manifest(
        data, lineage=lineage, version=route.version, digest=route.manifest, max_bytes=max_bytes, keys=keys
    )


def _path(routes: Sequence[Route], version: int, held: int | None) -> list[Route]:
    """Return the cheapest routes one after the other from what is held, or from nothing, to a version."""
    by_base: dict[int | None, list[Route]] = {}
    for route in routes:
        by_base.setdefault(route.base, []).append(route)
    best: dict[int, int] = {}
    queue: list[tuple[int, int, int, list[Route]]] = [(0, 0, -1, [])]
    if held is not None:
        queue.append((0, 1, held, []))
    count = len(queue)
    while queue:
        cost, _, at, path = heapq.heappop(queue)
        if at == version:
            return path
        if best.get(at, cost + 1) <= cost:
            continue
        best[at] = cost
        for route in by_base.get(None if at < 0 else at, []):
            count += 1
            heapq.heappush(queue, (cost + route.num_bytes, count, route.version, [*path, route]))
    msg = f"no way leads to version {version}; start a new lineage"
    raise IntegrityError(msg)


def apply(
    manifest: Manifest, objects: Mapping[str, bytes], base: Mapping[str, FlatTensor], *, keys: ChainKeys = WEIGHTS
) -> dict[str, FlatTensor]:
    """Return all tensors of a version from its objects and the version before it, in memory of their own.

    Every object is checked against its name before a byte of it is decoded, every tensor against its digest after.
    """
    for name, data in objects.items():
        if object_name(data) != name:
            msg = f"object {keys.object(manifest.lineage, name)} is damaged ({len(data)} bytes); fetch it again"
            raise IntegrityError(msg)
    tensors = {
        entry.name: FlatTensor(dtype=entry.dtype, shape=entry.shape, data=np.empty(tensor_bytes(entry), np.uint8))
        for entry in manifest.tensors
    }
    for piece in manifest.pieces:
        weights = _decoded(manifest, piece, objects[piece.object], base, keys)
        begin = 0
        for box in piece.boxes:
            end = begin + box_bytes(manifest, box)
            flat = tensors[manifest.tensors[box.tensor].name]
            put(flat.data, flat.shape, box, weights[begin:end])
            begin = end
    for entry in manifest.tensors:
        if tensor_digest(tensors[entry.name].data, entry.dtype) != entry.digest:
            msg = (
                f"tensor {entry.name!r} of version {manifest.version} has another digest than its manifest says; "
                f"the weights it was applied to are damaged: load from the anchor"
            )
            raise IntegrityError(msg)
    return tensors


def _decoded(
    manifest: Manifest, piece: Piece, data: bytes, base: Mapping[str, FlatTensor], keys: ChainKeys
) -> NDArray[np.uint8]:
    entries = [manifest.tensors[box.tensor] for box in piece.boxes]
    names = ", ".join(entry.name for entry in entries[:2]) + (", ..." if len(entries) > 2 else "")  # noqa: PLR2004
    key = keys.object(manifest.lineage, piece.object)
    place = f"version {manifest.version}, {names}: object {key}, bytes from {piece.offset}"
    if piece.encoding in DIFFERENCES:
        weights = np.concatenate(list(_bases(manifest, piece, base, place)))
    else:
        weights = np.empty(piece_bytes(manifest, piece), np.uint8)
    packed = memoryview(data)[piece.offset : piece.offset + piece.length]
    decode(piece.encoding, packed, weights=weights, dtype=entries[0].dtype, place=place)
    return weights


def _bases(manifest: Manifest, piece: Piece, base: Mapping[str, FlatTensor], place: str) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes that the boxes of a difference apply to."""
    for box in piece.boxes:
        entry = manifest.tensors[box.tensor]
        older = base.get(entry.name)
        if older is None or (older.dtype, older.shape) != (entry.dtype, entry.shape):
            msg = (
                f"{place} is refused: a difference to a tensor {entry.name!r} that its base lacks; start a new lineage"
            )
            raise IntegrityError(msg)
        yield part(older.data, older.shape, box)
