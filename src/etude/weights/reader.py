"""A version out of the store: found, fetched, verified, then decoded, in this order."""

import asyncio
from typing import Generic

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.errors import ObjectMissingError
from etude.interfaces import ObjectStore
from etude.weight_types import Head
from etude.weights.chain import MAX_HEAD_BYTES, WEIGHTS, ChainKeys, parse_head
from etude.weights.decoding import Staging
from etude.weights.downloads import Objects, StoreObjects
from etude.weights.kernels import T
from etude.weights.memory import HOST, Memory
from etude.weights.paths import MAX_VERSION_BYTES, Held, Path, find_path, walk
from etude.weights.tensors import Flat


class Loaded(msgspec.Struct, Generic[T], frozen=True, kw_only=True, eq=False):
    """All weights of one version, verified. Nobody writes to the tensors: they are the base of the next difference."""

    lineage: str
    version: int
    digest: str
    step: int
    tensors: dict[str, Flat[T]]
    source: str = ""
    """Digest of the version that this is a view of; empty for the policy as it is trained."""

    @property
    def held(self) -> Held:
        """What a reader has that has these weights."""
        return Held(lineage=self.lineage, version=self.version, digest=self.digest)


LoadedVersion = Loaded[NDArray[np.uint8]]
"""One on the CPU."""


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
    """Return the version that the head names, from the weights `held` where that is cheaper, else from an anchor.

    Raise `IntegrityError` when a part of the chain is not what its name, its manifest or the head says, and
    `StoreError` when one cannot be read. What is held stays untouched.
    """
    path = await find_path(store, head, held=held.held if held else None, max_bytes=max_bytes, keys=keys)
    return await build(path, StoreObjects(store), base=held, memory=HOST, keys=keys)


async def load_version(
    store: ObjectStore,
    *,
    lineage: str,
    version: int,
    max_bytes: int = MAX_VERSION_BYTES,
    keys: ChainKeys = WEIGHTS,
) -> LoadedVersion:
    """Return a version that may be older than the head, such as the one an evaluation is pinned to.

    Errors as in `load_head`.
    """
    head = await read_head(store, keys=keys)
    if head is None:
        msg = f"nothing is published under {keys.root}; check the run's URL"
        raise ObjectMissingError(msg)
    path = await find_path(store, head, held=None, target=(lineage, version), max_bytes=max_bytes, keys=keys)
    return await build(path, StoreObjects(store), base=None, memory=HOST, keys=keys)


async def build(
    path: Path, objects: Objects, *, base: Loaded[T] | None, memory: Memory[T], keys: ChainKeys = WEIGHTS
) -> Loaded[T]:
    """Return the version at the end of a path, in memory of its own; `base` is what the path was planned from.

    Of the versions in between only one is in memory at a time. Errors as in `load_head`.
    """
    if not path.manifests:
        assert base is not None
        return base
    staging = Staging(base.tensors if base else {}, memory=memory, keys=keys)
    await walk(path, objects, staging, keys=keys)
    tensors = await asyncio.to_thread(staging.result)
    newest = path.manifests[-1]
    return Loaded(
        lineage=path.lineage,
        version=newest.version,
        digest=newest.digest,
        step=newest.step,
        tensors=tensors,
        source=newest.source,
    )
