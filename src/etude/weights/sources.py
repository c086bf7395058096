"""Where a reader's objects come from: this host's disk, its peers, the store."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
from aiohttp import ClientSession

from etude.errors import ConfigError, StoreError
from etude.interfaces import Clock, ErasableStore
from etude.telemetry.clock import wall_time
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.downloads import Objects, StoreObjects
from etude.weights.host_cache import HostCache
from etude.weights.leases import LeaseKeeper, read_peers
from etude.weights.manifests import MAX_OBJECT_BYTES
from etude.weights.peers import PeerObjects, RecentObjects, serving_objects

_PEERS_FOR_S = 5.0
"""How long a look at who is there is good for."""


class Source(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a follower is given."""

    objects: Objects
    lease: LeaseKeeper | None
    """None for a reader that may not write, or was told not to."""
    from_store: StoreObjects
    """The last resort; it counts what was read."""


@asynccontextmanager
async def open_source(
    store: ErasableStore,
    *,
    clock: Clock,
    keys: ChainKeys = WEIGHTS,
    reader: str = "",
    cache: Path | None = None,
    cluster: str = "",
    listen: str = "127.0.0.1",
    leased: bool = True,
) -> AsyncGenerator[Source]:
    """Yield where objects come from, and a lease that is given back at the end.

    With `cache` the processes that share that directory download each object once. With `cluster` its readers divide
    the download, and this one serves its part on the address `listen`. A reader that is not `leased` writes nothing
    into the store, cannot be one of a cluster, and is not waited for by a collection of garbage.

    Raise `HostError` when this host refuses one of them.
    """
    if cluster and not leased:
        msg = "readers of a cluster find each other by their leases; leave one of both out"
        raise ConfigError(msg)
    from_store = StoreObjects(store)
    objects: Objects = from_store
    async with AsyncExitStack() as stack:
        address = ""
        if cluster:
            objects = RecentObjects(from_store)
            served = serving_objects(objects, keys=keys, max_bytes=MAX_OBJECT_BYTES, host=listen)
            address = await stack.enter_async_context(served)
        lease = LeaseKeeper(store, keys=keys, reader=reader, cluster=cluster, address=address)
        if cluster:
            session = await stack.enter_async_context(ClientSession())
            peers = _Peers(store, keys, cluster, clock)
            objects = PeerObjects(objects, reader=lease.reader, peers=peers.look, session=session)
        if cache is not None:
            objects = HostCache(cache, objects, clock=clock)
        try:
            yield Source(objects=objects, lease=lease if leased else None, from_store=from_store)
        finally:
            if leased:
                with suppress(StoreError):
                    await lease.release()


class _Peers:
    """Who else is there, looked up now and then."""

    def __init__(self, store: ErasableStore, keys: ChainKeys, cluster: str, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._cluster = cluster
        self._clock = clock
        self._found: Mapping[str, str] = {}
        self._until = float("-inf")

    async def look(self) -> Mapping[str, str]:
        """Return reader and address of each; those of the last look when the store does not answer."""
        if self._clock.now() >= self._until:
            self._until = self._clock.now() + _PEERS_FOR_S
            with suppress(StoreError):
                leases = await read_peers(self._store, self._keys, cluster=self._cluster, now=wall_time())
                self._found = {lease.reader: lease.address for lease in leases}
        return self._found
