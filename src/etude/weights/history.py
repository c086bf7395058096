"""What a chain holds, for people and scripts."""

from collections.abc import AsyncGenerator

import msgspec

from etude.errors import ConfigError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.weight_types import Head, PageName, Route
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.manifests import MAX_MANIFEST_BYTES
from etude.weights.paths import MAX_PUBLISHED_BYTES, Held, find_path, read_manifest, read_pages, start_of
from etude.weights.planner import bytes_of
from etude.weights.reader import read_head


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to get to a version that is kept."""

    kind: str
    """`anchor`, `delta`, or `skip` for a difference over several versions."""
    base: int | None
    num_bytes: int
    """Of the manifest and its objects."""


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version that can be read."""

    lineage: str
    version: int
    ways: tuple[Way, ...]
    is_head: bool


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the history of its run."""

    lineage: str
    version: int
    step: int
    epoch: int
    """Of the publisher that made it."""
    digest: str
    num_bytes: int
    """Of its difference, which is what a reader that keeps up downloads; of its anchor where it has no other."""
    anchor_bytes: int
    """0 where it has none."""
    parent: str
    """Lineage and version that the head named before; empty for the first one of a run."""


async def require_head(store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> Head:
    """Return the head; raise `ConfigError` when nothing was ever published."""
    head = await read_head(store, keys=keys)
    if head is None:
        msg = f"nothing is published under {keys.root}: check the URL and --view, or wait for the first version"
        raise ConfigError(msg)
    return head


async def kept_routes(
    store: ObjectStore, head: Head, *, keys: ChainKeys = WEIGHTS
) -> dict[tuple[str, int], list[Route]]:
    """Return the routes to every version that is kept, by lineage and version, the oldest first."""
    pages = await read_pages(store, PageName(head.lineage, head.routes), enough=lambda _: False, keys=keys)
    found: dict[tuple[str, int], list[Route]] = {}
    for _, page in reversed(pages):
        for route in page.routes:
            if page.lineage == head.lineage:
                kept = start_of(route) >= head.floor
            else:
                kept = await _is_there(store, keys.manifest(page.lineage, route.version, route.manifest))
            # What no anchor leads to is only for readers that hold its base.
            if kept and (route.base is None or (page.lineage, route.base) in found):
                found.setdefault((page.lineage, route.version), []).append(route)
    return found


async def _is_there(store: ObjectStore, key: str) -> bool:
    """The floor is that of the head's lineage. Of an older one manifests go before their objects do."""
    try:
        await store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    except ObjectMissingError:
        return False
    return True


async def list_versions(store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> list[VersionRow]:
    """Return every version that can be read, the oldest first."""
    head = await require_head(store, keys=keys)
    return [
        VersionRow(
            lineage=lineage,
            version=version,
            ways=tuple(_way(route) for route in routes),
            is_head=(lineage, version) == (head.lineage, head.version),
        )
        for (lineage, version), routes in (await kept_routes(store, head, keys=keys)).items()
    ]


async def log_versions(store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> AsyncGenerator[LogRow]:
    """Yield the history, the newest version first, reading a manifest for each."""
    head = await require_head(store, keys=keys)
    for (lineage, version), routes in reversed((await kept_routes(store, head, keys=keys)).items()):
        ways = {way.kind: way for way in map(_way, routes)}
        shown = next((route for route in routes if _way(route).kind == "delta"), routes[0])
        manifest = await read_manifest(store, lineage, shown, keys=keys)
        yield LogRow(
            lineage=lineage,
            version=version,
            step=manifest.step,
            epoch=manifest.epoch,
            digest=manifest.digest,
            num_bytes=shown.num_bytes,
            anchor_bytes=ways["anchor"].num_bytes if "anchor" in ways else 0,
            parent=f"{manifest.parent.lineage}/{manifest.parent.version}" if manifest.parent else "",
        )


async def find_version(store: ObjectStore, name: str, *, keys: ChainKeys = WEIGHTS) -> tuple[str, int]:
    """Return lineage and number of a version named as `head`, `12` (in the head's lineage) or `lineage/12`.

    Raise `ConfigError` for a version that is not kept.
    """
    head = await require_head(store, keys=keys)
    if name == "head":
        return head.lineage, head.version
    lineage, _, number = name.rpartition("/")
    found = (lineage or head.lineage, int(number) if number.isascii() and number.isdigit() else -1)
    if found not in await kept_routes(store, head, keys=keys):
        msg = f"there is no version {name!r}; `etude weights ls` lists those that are kept"
        raise ConfigError(msg)
    return found


def _way(route: Route) -> Way:
    kind = "anchor" if route.base is None else "delta" if route.version - route.base == 1 else "skip"
    return Way(kind=kind, base=route.base, num_bytes=route.num_bytes)


async def bytes_between(store: ObjectStore, held: Held, target: tuple[str, int], *, keys: ChainKeys = WEIGHTS) -> int:
    """Return the bytes of the cheapest path from what is held to a version; 0 when both are the same."""
    head = await require_head(store, keys=keys)
    path = await find_path(store, head, held=held, target=target, max_bytes=MAX_PUBLISHED_BYTES, keys=keys)
    return bytes_of(path.routes)
