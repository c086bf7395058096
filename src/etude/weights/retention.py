"""What of a chain is still needed, and how the rest goes without pulling it from under a reader.

First the head's floor rises: readers that begin afterwards do not start below it. Then what nobody needs is marked.
Only after a grace, and only what is still not needed then, is deleted. Marks lie in the store, so whoever is killed in
between loses nothing: the next collection goes on.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from etude.errors import IntegrityError, ObjectMissingError, StoreError
from etude.interfaces import Clock, ErasableStore, ObjectStore
from etude.telemetry.clock import wall_time
from etude.weight_types import Head, PageName, Route, RoutePage
from etude.weights.chain import MAX_HEAD_BYTES, WEIGHTS, ChainKeys, decode_record, parse_head
from etude.weights.leases import LEASE_S, ReaderLease, all_leases, live_leases
from etude.weights.manifests import object_sizes
from etude.weights.paths import read_manifest, read_pages, start_of

KEEP_ANCHORS = 2
GRACE_S = 600.0
"""Longer than the longest download of a reader without a lease, and than lists of the store are late."""
ORPHAN_GRACE_S = 86_400.0
"""Longer than the longest upload: what nothing leads to may belong to a version that is about to be published."""
_MAX_MARKS_BYTES = 64 << 20
_SWAP_ATTEMPTS = 20


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Something that was not needed at some moment."""

    key: str
    since: float
    """Seconds since 1970, UTC."""
    orphan: bool
    """Nothing was found that leads to it."""


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """All marks of a chain, `{root}/garbage.json`."""

    marks: tuple[Mark, ...] = ()
    format: int = 1


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did or, if it only looked, would do."""

    lineage: str
    floor: int
    """Oldest version that readers may start from."""
    readers: int
    """Live leases."""
    kept: int
    """Objects, manifests and pages of routes that are needed."""
    deleted: tuple[str, ...]
    waiting: int
    """What nothing leads to, younger than its grace."""


class Survey(NamedTuple):
    """A chain at one moment."""

    data: bytes
    """Of the head."""
    head: Head
    floor: int
    """To which the head's can rise."""
    leases: Sequence[ReaderLease]
    """Live ones."""
    silent: Sequence[ReaderLease]
    """Those that have expired, unless it is a clock that is wrong."""
    kept: frozenset[str]
    dropped: frozenset[str]
    """Keys that routes below the floor lead to, and no others."""


async def collect(
    store: ErasableStore,
    *,
    clock: Clock,
    keys: ChainKeys = WEIGHTS,
    keep: int = KEEP_ANCHORS,
    grace_s: float = GRACE_S,
    orphan_grace_s: float = ORPHAN_GRACE_S,
    dry_run: bool = False,
    wall: Callable[[], float] = wall_time,
) -> Collected | None:
    """Delete what neither the newest `keep` anchors nor a live lease needs; None when nothing was published.

    Takes `grace_s` when there is something to delete.

    Raises:
        StoreError: The store failed, or the chain or a lease is damaged; nothing that is needed was deleted.
    """
    found = await survey(store, keys, keep=keep, now=wall())
    if found is None:
        return None
    if dry_run:
        marks = await _marked(store, keys, found, wall())
        return _collected(found, sorted(found.dropped), sum(mark.orphan for mark in marks))
    await _raise_floor(store, keys, found)
    marks = await _marked(store, keys, found, wall())
    if not marks:
        return _collected(found, (), 0)
    await _write_marks(store, keys, marks)
    await clock.sleep(_pause(found, marks, grace_s=grace_s, now=wall()))
    # Meanwhile a lease that was written before the floor rose has become visible, or an orphan was published.
    now = wall()
    heard = {lease.reader: lease.expires for lease in (*found.leases, *found.silent)}
    found = await survey(store, keys, keep=keep, now=now, heard=heard)
    assert found is not None
    due = [
        mark.key
        for mark in marks
        if mark.key not in found.kept and now - mark.since >= (orphan_grace_s if mark.orphan else grace_s)
    ]
    gone = await _delete(store, keys, found, due)
    for lease in found.silent:
        if now - lease.expires >= orphan_grace_s:
            await store.delete(keys.reader(lease.reader))
    left = [mark for mark in marks if mark.key not in gone and mark.key not in found.kept]
    await _write_marks(store, keys, left)
    return _collected(found, sorted(gone), len(left))


def _pause(found: Survey, marks: Sequence[Mark], *, grace_s: float, now: float) -> float:
    """Return how long to wait: for the grace, and for readers whose clocks are wrong to renew their leases."""
    grace = max([0.0, *(mark.since + grace_s - now for mark in marks if not mark.orphan)])
    return max(grace, min(grace_s, LEASE_S) if found.silent else 0.0)


async def _delete(store: ErasableStore, keys: ChainKeys, found: Survey, due: Sequence[str]) -> set[str]:
    """Delete what is due, and return it: less what a version needs that was published since the survey."""
    gone: set[str] = set()
    needed: set[str] = set()
    data = found.data
    for key in due:
        now = await store.get(keys.head, max_bytes=MAX_HEAD_BYTES)
        if now != data:
            needed, data = await _needed_since(store, keys, found, parse_head(now, keys=keys)), now
        if key not in needed:
            await store.delete(key)
            gone.add(key)
    return gone


async def _needed_since(store: ObjectStore, keys: ChainKeys, found: Survey, head: Head) -> set[str]:
    """Return the keys that routes lead to which were not there when the chain was surveyed."""

    def known(page: RoutePage) -> bool:
        return page.lineage == found.head.lineage and page.routes[0].version <= found.head.version

    needed: set[str] = set()
    pages = await read_pages(store, PageName(head.lineage, head.routes), enough=known, keys=keys)
    for name, page in pages:
        needed.add(keys.object(name.lineage, name.page))
        for route in page.routes:
            if page.lineage != found.head.lineage or route.version >= found.head.version:
                needed |= await _reached(store, keys, page.lineage, route)
    return needed


async def survey(
    store: ObjectStore, keys: ChainKeys, *, keep: int, now: float, heard: Mapping[str, float] | None = None
) -> Survey | None:
    """Return what of the chain is needed at a moment; None when nothing was published.

    Leases that were renewed since they were `heard` of are live, whatever the clocks say.

    Raises:
        StoreError: Something that is needed cannot be read.
    """
    try:
        data = await store.get(keys.head, max_bytes=MAX_HEAD_BYTES)
    except ObjectMissingError:
        return None
    head = parse_head(data, keys=keys)
    every = await all_leases(store, keys)
    leases = live_leases(every, now=now, heard=heard)
    silent = [lease for lease in every if lease not in leases]
    pages = await read_pages(store, PageName(head.lineage, head.routes), enough=lambda _: False, keys=keys)
    anchors: dict[str, list[int]] = {}
    for _, page in pages:
        anchors.setdefault(page.lineage, []).extend(route.version for route in page.routes if route.base is None)
    newest = sorted(anchors.get(head.lineage, []), reverse=True)
    wanted = [
        *((lease.lineage, lease.version) for lease in leases),
        (head.lineage, newest[keep - 1] if len(newest) >= keep else head.floor),
    ]
    needed: dict[str, int] = {}
    for lineage, version in wanted:
        # What is kept begins with an anchor, so that all of it can be read by who holds nothing.
        begin = max((anchor for anchor in anchors.get(lineage, []) if anchor <= version), default=version)
        needed[lineage] = min(begin, needed.get(lineage, begin))
    floor = max(head.floor, needed[head.lineage])
    kept: set[str] = set()
    dropped: set[str] = set()
    for name, page in reversed(pages):
        routes = [route for route in page.routes if start_of(route) >= needed.get(page.lineage, sys.maxsize)]
        # A page that leads to one that is needed is needed too.
        (kept if routes or kept else dropped).add(keys.object(name.lineage, name.page))
        for route in page.routes:
            reached = await _reached(store, keys, page.lineage, route)
            if not reached and page.lineage == head.lineage and start_of(route) >= head.floor:
                msg = f"version {route.version} of lineage {head.lineage} has lost a manifest; restore it from a copy"
                raise IntegrityError(msg)
            (kept if route in routes else dropped).update(reached)
    return Survey(data, head, floor, leases, silent, frozenset(kept), frozenset(dropped - kept))


async def _reached(store: ObjectStore, keys: ChainKeys, lineage: str, route: Route) -> set[str]:
    """Return the keys of a route's manifest and of its objects; none when the manifest is gone, which goes first."""
    try:
        manifest = await read_manifest(store, lineage, route, keys=keys)
    except ObjectMissingError:
        return set()
    objects = (keys.object(lineage, name) for name in object_sizes(manifest))
    return {keys.manifest(lineage, route.version, route.manifest), *objects}


async def _raise_floor(store: ErasableStore, keys: ChainKeys, found: Survey) -> None:
    """Move the head's floor, and nothing else of it, while its publisher may be moving the rest."""
    for _ in range(_SWAP_ATTEMPTS):
        # A survey takes long: by now the head may be at newer versions, for which this floor holds as well.
        data = await store.get(keys.head, max_bytes=MAX_HEAD_BYTES)
        head = parse_head(data, keys=keys)
        if head.lineage != found.head.lineage or head.floor >= found.floor:
            return
        if await store.compare_and_swap(
            keys.head, msgspec.json.encode(replace(head, floor=found.floor)), expected=data
        ):
            return
    msg = f"{keys.head} moved {_SWAP_ATTEMPTS} times in a row while its floor was to rise; collect again later"
    raise StoreError(msg)


async def _marked(store: ObjectStore, keys: ChainKeys, found: Survey, now: float) -> list[Mark]:
    """Return the marks there are, without what is needed again, and new ones."""
    try:
        place = _marks_key(keys)
        data = await store.get(place, max_bytes=_MAX_MARKS_BYTES)
        old = decode_record(data, Marks, place, known=1, advice="delete it, and the graces begin anew").marks
    except ObjectMissingError:
        old = ()
    marks = {mark.key: mark for mark in old if mark.key not in found.kept}
    for key in sorted(found.dropped):
        if key not in marks or marks[key].orphan:
            marks[key] = Mark(key, now, orphan=False)
    for key in await store.list(keys.root):
        apart = key in (keys.head, _marks_key(keys)) or key.startswith(f"{keys.readers}/")
        if not apart and key not in found.kept and key not in marks:
            marks[key] = Mark(key, now, orphan=True)
    return list(marks.values())


async def _write_marks(store: ErasableStore, keys: ChainKeys, marks: Sequence[Mark]) -> None:
    """Also when there are none left: the file tells who looks for what is gone that something was collected."""
    await store.put(_marks_key(keys), msgspec.json.encode(Marks(marks=tuple(marks))))


def _marks_key(keys: ChainKeys) -> str:
    return f"{keys.root}/garbage.json"


def _collected(found: Survey, deleted: Sequence[str], waiting: int) -> Collected:
    return Collected(
        lineage=found.head.lineage,
        floor=found.floor,
        readers=len(found.leases),
        kept=len(found.kept),
        deleted=tuple(deleted),
        waiting=waiting,
    )
