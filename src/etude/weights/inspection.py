"""Whether everything that a chain keeps is what it claims."""

import asyncio
from collections import OrderedDict

import msgspec

from etude.errors import StoreError
from etude.interfaces import ObjectStore
from etude.weight_types import Manifest, Route
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.decoding import Staging
from etude.weights.downloads import StoreObjects
from etude.weights.history import kept_routes, require_head
from etude.weights.memory import HOST
from etude.weights.origins import origin_problem
from etude.weights.paths import Path, read_manifest, walk
from etude.weights.reader import LoadedVersion, load_version

_IN_MEMORY_BYTES = 8 << 30


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not what it claims to be."""

    lineage: str
    version: int
    base: int | None
    what: str


class ChainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a chain."""

    lineage: str
    version: int
    """Of the head."""
    versions: int
    routes: int
    """Each was fetched, applied to what it starts from, and gave the digest of its version."""
    num_bytes: int
    """Of objects read."""
    problems: tuple[Problem, ...]


async def inspect(store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> ChainReport:
    """Rebuild every version that is kept by every way that leads to it.

    What is wrong is told, not raised, except for the head and its routes, without which there is nothing to look at.
    """
    head = await require_head(store, keys=keys)
    kept = await kept_routes(store, head, keys=keys)
    inspector = _Inspector(store, keys)
    problems: list[Problem] = []
    for (lineage, version), routes in kept.items():
        digests: set[str] = set()
        for route in routes:
            try:
                manifest = await inspector.rebuild(lineage, route)
                if not digests and (what := await origin_problem(store, manifest, keys=keys)):
                    problems.append(Problem(lineage=lineage, version=version, base=None, what=what))
                digests.add(manifest.digest)
            except StoreError as error:
                problems.append(Problem(lineage=lineage, version=version, base=route.base, what=str(error)))
        if (lineage, version) == (head.lineage, head.version):
            digests.add(head.digest)
        if len(digests) > 1:
            what = f"its ways lead to {len(digests)} different versions of it"
            problems.append(Problem(lineage=lineage, version=version, base=None, what=what))
    return ChainReport(
        lineage=head.lineage,
        version=head.version,
        versions=len(kept),
        routes=sum(map(len, kept.values())),
        num_bytes=inspector.objects.num_bytes,
        problems=tuple(problems),
    )


class _Inspector:
    """Goes along routes, keeping as many of the versions it saw as fit the memory."""

    def __init__(self, store: ObjectStore, keys: ChainKeys) -> None:
        self.objects = StoreObjects(store)
        self._store = store
        self._keys = keys
        self._seen: OrderedDict[tuple[str, int], LoadedVersion] = OrderedDict()

    async def rebuild(self, lineage: str, route: Route) -> Manifest:
        """Go along a route, and return its manifest when it leads to what that says."""
        manifest = await read_manifest(self._store, lineage, route, keys=self._keys)
        base = None if route.base is None else await self._base(lineage, route.base)
        if base is not None and base.digest != manifest.base_digest:
            msg = f"the difference to version {route.base} is to other weights than that version has"
            raise StoreError(msg)
        staging = Staging(base.tensors if base else {}, memory=HOST, keys=self._keys)
        path = Path(lineage=lineage, oldest=route.version, routes=(route,), manifests=(manifest,))
        await walk(path, self.objects, staging, keys=self._keys)
        tensors = await asyncio.to_thread(staging.result)
        self._keep(
            LoadedVersion(
                lineage=lineage, version=route.version, digest=manifest.digest, step=manifest.step, tensors=tensors
            )
        )
        return manifest

    async def _base(self, lineage: str, version: int) -> LoadedVersion:
        held = self._seen.get((lineage, version))
        return held or await load_version(self._store, lineage=lineage, version=version, keys=self._keys)

    def _keep(self, loaded: LoadedVersion) -> None:
        self._seen[loaded.lineage, loaded.version] = loaded
        while len(self._seen) > 1 and sum(map(_size, self._seen.values())) > _IN_MEMORY_BYTES:
            self._seen.popitem(last=False)


def _size(loaded: LoadedVersion) -> int:
    return sum(flat.data.size for flat in loaded.tensors.values())
