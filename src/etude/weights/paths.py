"""From the head to the manifests that a reader applies: pages of routes, a plan, and the links between its parts."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, runtime_checkable

import msgspec

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.weight_types import Head, Manifest, PageName, Route, RoutePage
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.decoding import objects_of
from etude.weights.downloads import Objects, Wanted, in_order
from etude.weights.manifests import MAX_MANIFEST_BYTES, parse_manifest
from etude.weights.planner import MAX_ROUTES, cheapest
from etude.weights.routes import MAX_PAGE_BYTES, parse_page

MAX_PUBLISHED_BYTES = 2 << 40
"""Of all decoded tensors of one version."""
MAX_VERSION_BYTES = max(64 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
"""Of one that is held in memory, whatever a manifest claims."""
_MANIFESTS_AT_ONCE = 8
_MAX_PAGES = 8192
_MAX_PARTS = 1 << 22
"""Tensors and pieces of all manifests of a path: they are in memory together."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader has."""

    lineage: str
    version: int
    digest: str


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """What leads a reader to a version."""

    lineage: str
    oldest: int
    """Version that must be kept until the reader has arrived: what it holds, or the anchor it starts from."""
    routes: tuple[Route, ...]
    manifests: tuple[Manifest, ...]
    """To be applied one after the other; none when the version is held."""

    def wanted(self, keys: ChainKeys) -> list[Wanted]:
        """Return the objects in the order in which they are applied."""
        return [
            Wanted(key=keys.object(self.lineage, name), name=name, size=size)
            for manifest in self.manifests
            for name, size in objects_of(manifest).items()
        ]


@runtime_checkable
class Sink(Protocol):
    """Where versions are built, one after the other."""

    def begin(self, manifest: Manifest) -> None:
        """Start with a version; the one before was ended."""
        ...

    def add(self, manifest: Manifest, name: str, data: bytes) -> None:
        """Take one of its objects, verified."""
        ...

    def end(self, manifest: Manifest) -> None:
        """All objects of the version were added."""
        ...


async def find_path(
    store: ObjectStore,
    head: Head,
    *,
    held: Held | None,
    max_bytes: int,
    target: tuple[str, int] | None = None,
    keys: ChainKeys = WEIGHTS,
) -> Path:
    """Return the cheapest path to the head's version, or to another `target` (lineage, version) that is kept.

    Raises:
        IntegrityError: Part of it is not what its name says, or the parts do not follow each other.
        StoreError: Part of it cannot be read, maybe because the floor has passed it: read the head again.
    """
    lineage, version = target or (head.lineage, head.version)
    is_head = (lineage, version) == (head.lineage, head.version)
    start = held if held is not None and held.lineage == lineage and held.version <= version else None
    since = start.version if start is not None else head.anchor if is_head else 0
    floor = head.floor if lineage == head.lineage else 0
    page = PageName(head.lineage, head.routes)
    routes = await read_routes(store, page, lineage=lineage, since=max(since, floor), keys=keys)
    kept = [route for route in routes if start_of(route) >= floor]
    plan = cheapest(kept, version=version, held=None if start is None else start.version)
    manifests = await _read_manifests(store, lineage, plan, max_bytes=max_bytes, keys=keys)
    _check_links(manifests, start, keys)
    found = manifests[-1].digest if manifests else start.digest if start else ""
    if is_head and found != head.digest:
        msg = f"{keys.head} names another digest than version {version} has; start a new lineage"
        raise IntegrityError(msg)
    oldest = version if not plan else start_of(plan[0])
    return Path(lineage=lineage, oldest=oldest, routes=tuple(plan), manifests=tuple(manifests))


async def read_routes(
    store: ObjectStore, newest: PageName, *, lineage: str, since: int, keys: ChainKeys = WEIGHTS
) -> list[Route]:
    """Return the routes of a lineage, at least all those to versions from `since` on, walking back from a page."""

    def enough(page: RoutePage) -> bool:
        return page.lineage == lineage and page.routes[0].version <= since

    pages = await read_pages(store, newest, enough=enough, keys=keys)
    return [route for _, page in reversed(pages) if page.lineage == lineage for route in page.routes]


async def read_pages(
    store: ObjectStore, newest: PageName, *, enough: Callable[[RoutePage], bool], keys: ChainKeys = WEIGHTS
) -> list[tuple[PageName, RoutePage]]:
    """Return pages of routes, the newest first, up to one that is `enough`, the last, or one that is deleted."""
    pages: list[tuple[PageName, RoutePage]] = []
    count = 0
    name: PageName | None = newest
    while name is not None:
        try:
            data = await store.get(keys.object(name.lineage, name.page), max_bytes=MAX_PAGE_BYTES)
        except ObjectMissingError:
            if not pages:
                raise
            return pages
        page = parse_page(data, lineage=name.lineage, digest=name.page, keys=keys)
        pages.append((name, page))
        count += len(page.routes)
        if enough(page) or count > MAX_ROUTES or len(pages) > _MAX_PAGES:
            break
        name = page.older
    return pages


async def read_manifest(
    store: ObjectStore,
    lineage: str,
    route: Route,
    *,
    max_bytes: int = MAX_PUBLISHED_BYTES,
    keys: ChainKeys = WEIGHTS,
) -> Manifest:
    """Return the manifest of a route; errors as in `find_path`."""
    key = keys.manifest(lineage, route.version, route.manifest)
    data = await store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    manifest = parse_manifest(
        data, lineage=lineage, version=route.version, digest=route.manifest, max_bytes=max_bytes, keys=keys
    )
    if manifest.base != route.base:
        msg = f"{key} leads from version {manifest.base}, not from {route.base} as its route says"
        raise IntegrityError(msg)
    return manifest


async def walk(path: Path, objects: Objects, sink: Sink, *, keys: ChainKeys = WEIGHTS) -> None:
    """Fetch the objects of a path ahead of need and build its versions in the sink, one object at a time.

    Raise `IntegrityError` when something does not fit, `StoreError` when something is not to be had.
    """
    async with aclosing(in_order(objects, path.wanted(keys))) as arriving:
        for manifest in path.manifests:
            await asyncio.to_thread(sink.begin, manifest)
            await _add(manifest, arriving, sink)
            await asyncio.to_thread(sink.end, manifest)


async def _add(manifest: Manifest, arriving: AsyncGenerator[bytes], sink: Sink) -> None:
    for name in objects_of(manifest):
        data = await anext(arriving)
        await asyncio.to_thread(sink.add, manifest, name, data)
        del data  # not to be held while the next one is awaited


async def _read_manifests(
    store: ObjectStore, lineage: str, plan: Sequence[Route], *, max_bytes: int, keys: ChainKeys
) -> list[Manifest]:
    manifests: list[Manifest] = []
    for begin in range(0, len(plan), _MANIFESTS_AT_ONCE):
        some = plan[begin : begin + _MANIFESTS_AT_ONCE]
        reads = (read_manifest(store, lineage, route, max_bytes=max_bytes, keys=keys) for route in some)
        manifests += await asyncio.gather(*reads)
        if sum(len(manifest.tensors) + len(manifest.pieces) for manifest in manifests) > _MAX_PARTS:
            msg = f"the manifests to version {plan[-1].version} have more than {_MAX_PARTS} parts; publish an anchor"
            raise IntegrityError(msg)
    return manifests


def _check_links(manifests: Sequence[Manifest], held: Held | None, keys: ChainKeys) -> None:
    """A difference is to exactly what the reader has by then."""
    version, digest = (held.version, held.digest) if held else (None, "")
    for manifest in manifests:
        if manifest.base is not None and (manifest.base, manifest.base_digest) != (version, digest):
            msg = (
                f"{keys.root}: version {manifest.version} is a difference to other weights than those of version "
                f"{version}; load it from an anchor"
            )
            raise IntegrityError(msg)
        version, digest = manifest.version, manifest.digest


def start_of(route: Route) -> int:
    """Return the oldest version that a route needs."""
    return route.version if route.base is None else route.base
