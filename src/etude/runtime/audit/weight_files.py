"""Manifests and weight objects, rebuilt version by version."""

from contextlib import suppress

import msgspec

from etude.errors import EtudeError, IntegrityError, ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.runtime.audit.facts import Facts
from etude.weight_types import Head, Manifest, PageName
from etude.weights.chain import WEIGHTS
from etude.weights.decoding import apply
from etude.weights.digest import object_name
from etude.weights.manifests import MAX_MANIFEST_BYTES, object_sizes, parse_manifest
from etude.weights.paths import MAX_PUBLISHED_BYTES, read_pages
from etude.weights.reader import read_head
from etude.weights.tensors import FlatTensor

_SCHEMA = """
CREATE TABLE weights(
    lineage TEXT, version INTEGER, manifest TEXT, digest TEXT, base INTEGER, base_digest TEXT, rebuilt INTEGER,
    problem TEXT
);
CREATE TABLE referred(key TEXT PRIMARY KEY);
CREATE TABLE paged(key TEXT PRIMARY KEY);
"""
"""`weights`: a row for each manifest that is there. `referred`: objects that a manifest names. `paged`: pages of routes
that the head leads to, up to one that is gone."""


_ROW = "INSERT INTO weights VALUES(?, ?, ?, ?, ?, ?, ?, ?)"


class _Held(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The weights that were rebuilt last."""

    lineage: str
    digest: str
    tensors: dict[str, FlatTensor]


async def look_at_weights(store: ObjectStore, facts: Facts, *, rebuild: bool) -> None:
    """Read every published manifest and its objects; with `rebuild`, make each version once and check the result.

    Objects are checked wherever they are named, and weights where they are reached from the version before.
    """
    facts.sql.executescript(_SCHEMA + "BEGIN;")
    facts.sql.executemany("INSERT OR IGNORE INTO paged VALUES(?)", [(key,) for key in await _pages(store)])
    held: _Held | None = None
    query = (
        "SELECT DISTINCT lineage, version, manifest, base FROM published "
        "ORDER BY lineage, version, CASE base WHEN 'null' THEN -1 ELSE CAST(base AS INTEGER) END DESC"
    )
    made: tuple[str, int] | None = None
    for lineage, version, name, _ in list(facts.rows(query)):
        try:
            manifest = await _manifest(store, lineage, version, name)
        except ObjectMissingError:
            continue
        except IntegrityError as error:
            facts.sql.execute(_ROW, (lineage, version, name, "", None, "", False, str(error)))
            continue
        keys = [(WEIGHTS.object(lineage, one),) for one in object_sizes(manifest)]
        facts.sql.executemany("INSERT OR IGNORE INTO referred VALUES(?)", keys)
        problem = ""
        try:
            held = await _made(store, manifest, held, rebuild=rebuild and made != (lineage, version)) or held
            made = (lineage, version)
        except EtudeError as error:
            problem = str(error)
        row = (lineage, version, name, manifest.digest, manifest.base, manifest.base_digest, rebuild, problem)
        facts.sql.execute(_ROW, row)


async def _pages(store: ObjectStore) -> list[str]:
    """Return the keys of the pages that the head leads to; what is damaged is told where files are compared."""
    keys: list[str] = []
    with suppress(StoreError):
        head = await read_head(store)
        if head is not None:
            keys.append(WEIGHTS.object(head.lineage, head.routes))
            pages = await read_pages(store, PageName(head.lineage, head.routes), enough=lambda _: False)
            older = (page.older for _, page in pages if page.older is not None)
            keys += [WEIGHTS.object(name.lineage, name.page) for name in older]
    return keys


async def _manifest(store: ObjectStore, lineage: str, version: int, name: str) -> Manifest:
    data = await store.get(WEIGHTS.manifest(lineage, version, name), max_bytes=MAX_MANIFEST_BYTES)
    return parse_manifest(data, lineage=lineage, version=version, digest=name, max_bytes=MAX_PUBLISHED_BYTES)


async def _made(store: ObjectStore, manifest: Manifest, held: _Held | None, *, rebuild: bool) -> _Held | None:
    """Check the objects of a manifest and, with `rebuild`, return what they make of the weights that are held."""
    objects: dict[str, bytes] = {}
    for name, size in object_sizes(manifest).items():
        key = WEIGHTS.object(manifest.lineage, name)
        data = await store.get(key, max_bytes=size)
        if object_name(data) != name:
            msg = f"object {key} is damaged ({len(data)} bytes); restore it from a copy"
            raise IntegrityError(msg)
        if rebuild:
            objects[name] = data
    if not rebuild:
        return None
    if manifest.base is not None and (
        held is None or (held.lineage, held.digest) != (manifest.lineage, manifest.base_digest)
    ):
        msg = f"it continues version {manifest.base}, which cannot be rebuilt"
        raise IntegrityError(msg)
    tensors = apply(manifest, objects, held.tensors if held else {})
    return _Held(lineage=manifest.lineage, digest=manifest.digest, tensors=tensors)


def collected(facts: Facts, head: Head | None, lineage: str, version: int, base: str) -> str:
    """Return why weights that were published may be gone; empty when they may not.

    `base` is the version that they are a difference to, as JSON. Nobody starts from what lies below the head's floor,
    and nobody but a reader with a lease from a lineage that ended.
    """
    if head is None:
        return ""
    if lineage != head.lineage:
        opened = facts.one("SELECT count(*) FROM lineage_opened WHERE lineage = ?", lineage)
        return "weights of a lineage that ended, collected as garbage" if opened else ""
    start = version if base == "null" else int(base)
    return "weights below the floor, collected as garbage" if start < head.floor else ""
