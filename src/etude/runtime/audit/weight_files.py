"""Manifests and weight objects, rebuilt version by version."""

from etude.errors import EtudeError, IntegrityError, StoreError
from etude.interfaces import ObjectStore
from etude.runtime.audit.facts import Facts
from etude.types import Manifest
from etude.weights.chain import MAX_MANIFEST_BYTES, manifest_key, object_key, object_sizes, parse_manifest
from etude.weights.digest import object_name
from etude.weights.reader import MAX_VERSION_BYTES, LoadedVersion, load_version

_SCHEMA = """
CREATE TABLE weights(lineage TEXT, version INTEGER, digest TEXT, rebuilt INTEGER, problem TEXT);
CREATE TABLE referred(key TEXT PRIMARY KEY);
"""
"""`referred`: objects that a manifest names."""


async def look_at_weights(store: ObjectStore, facts: Facts, *, rebuild: bool) -> None:
    """Read every published version's manifest and objects; with `rebuild`, apply them and check the result."""
    facts.sql.executescript(_SCHEMA + "BEGIN;")
    held: LoadedVersion | None = None
    query = "SELECT DISTINCT lineage, version FROM published ORDER BY lineage, version"
    for lineage, version in list(facts.rows(query)):
        if held is not None and held.lineage != lineage:
            held = None
        try:
            manifest = await _manifest(store, lineage, version)
        except StoreError as error:
            if isinstance(error, IntegrityError) or await _is_there(store, manifest_key(lineage, version)):
                _note(facts, lineage, version, problem=str(error))
            held = None
            continue
        names = [(object_key(lineage, name),) for name in object_sizes(manifest)]
        facts.sql.executemany("INSERT OR IGNORE INTO referred VALUES(?)", names)
        try:
            if rebuild:
                held = await load_version(store, lineage=lineage, version=version, held=held)
            else:
                await _look_at_objects(store, manifest)
        except EtudeError as error:
            held = None
            _note(facts, lineage, version, problem=str(error))
        else:
            _note(facts, lineage, version, digest=manifest.digest, rebuilt=rebuild)


async def _manifest(store: ObjectStore, lineage: str, version: int) -> Manifest:
    data = await store.get(manifest_key(lineage, version), max_bytes=MAX_MANIFEST_BYTES)
    return parse_manifest(data, lineage=lineage, version=version, max_bytes=MAX_VERSION_BYTES)


async def _is_there(store: ObjectStore, key: str) -> bool:
    return key in await store.list(key.rpartition("/")[0])


async def _look_at_objects(store: ObjectStore, manifest: Manifest) -> None:
    for name, size in object_sizes(manifest).items():
        key = object_key(manifest.lineage, name)
        data = await store.get(key, max_bytes=size)
        if object_name(data) != name:
            msg = f"object {key} is damaged ({len(data)} bytes); restore it from a copy"
            raise IntegrityError(msg)


def _note(
    facts: Facts, lineage: str, version: int, *, digest: str = "", rebuilt: bool = False, problem: str = ""
) -> None:
    row = (lineage, version, digest, rebuilt, problem)
    facts.sql.execute("INSERT INTO weights VALUES(?, ?, ?, ?, ?)", row)
