"""What readers need, said by themselves, so that nothing is deleted under their feet."""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import msgspec

from etude.errors import IntegrityError, ObjectMissingError, StoreError
from etude.interfaces import ErasableStore, ObjectStore
from etude.telemetry.clock import wall_time
from etude.weights.chain import ChainKeys, decode_record
from etude.weights.downloads import Objects, Wanted

MAX_LEASE_BYTES = 4096
MAX_READERS = 10_000
LEASE_S = 300.0
_READER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class ReaderLease(msgspec.Struct, frozen=True, kw_only=True):
    """One reader's lease, `{root}/readers/{reader}.json`."""

    reader: str
    lineage: str
    version: int
    """The oldest one that it still needs: what it holds, or the anchor that it starts from."""
    wanted: int
    """The one that it is on its way to, or holds."""
    expires: float
    """Seconds since 1970, UTC."""
    cluster: str = ""
    """Readers of one cluster share downloads."""
    address: str = ""
    """Where it serves objects to the others, such as http://10.0.0.7:9000; empty when it does not."""
    format: int = 1


class LeaseKeeper:
    """Keeps one reader's lease alive."""

    def __init__(
        self,
        store: ErasableStore,
        *,
        keys: ChainKeys,
        reader: str = "",
        cluster: str = "",
        address: str = "",
        ttl_s: float = LEASE_S,
        wall: Callable[[], float] = wall_time,
    ) -> None:
        """Write as `reader`, or as one that nobody is yet, a lease that ends `ttl_s` seconds after its last renewal."""
        self.reader = reader or f"reader-{secrets.token_hex(6)}"
        if _READER.fullmatch(self.reader) is None:
            msg = f"{self.reader[:80]!r} is not the plain name of a reader: letters, digits, _ and -"
            raise ValueError(msg)
        self._cluster = cluster
        self._address = address
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._wall = wall
        self._held: ReaderLease | None = None
        self._renewed = 0.0
        """When it was written, on this machine's clock."""

    def covers(self, lineage: str, version: int) -> bool:
        """Whether the lease, as last written, keeps everything from a version on, and will for a while."""
        held = self._held
        # A clock that was set back says nothing of how old the lease is.
        if held is None or not 0.0 <= self._wall() - self._renewed < self._ttl_s / 2:
            return False
        return held.lineage == lineage and held.version <= version

    async def hold(self, lineage: str, version: int, *, wanted: int) -> None:
        """Say that everything from `version` on is needed; a lease that says so already is renewed at half its time."""
        if self.covers(lineage, version):
            return
        now = self._wall()
        lease = ReaderLease(
            reader=self.reader,
            lineage=lineage,
            version=version,
            wanted=wanted,
            expires=now + self._ttl_s,
            cluster=self._cluster,
            address=self._address,
        )
        try:
            await self._store.put(self._keys.reader(self.reader), msgspec.json.encode(lease))
        except StoreError as error:
            msg = (
                f"no lease could be written, and without one what is read may be deleted meanwhile (who may only read "
                f"can follow with --no-lease): {error}"
            )
            raise StoreError(msg) from error
        self._held, self._renewed = lease, now

    def renewing(self, objects: Objects, lineage: str, version: int, *, wanted: int) -> Objects:
        """Return objects that renew the lease as they are fetched, so that it outlasts a long download."""
        return _Renewing(self, objects, lineage, version, wanted)

    async def release(self) -> None:
        """Say that nothing is needed any more."""
        self._held = None
        await self._store.delete(self._keys.reader(self.reader))


class _Renewing:
    def __init__(self, lease: LeaseKeeper, objects: Objects, lineage: str, version: int, wanted: int) -> None:
        self._lease = lease
        self._objects = objects
        self._needed = (lineage, version)
        self._wanted = wanted

    async def fetch(self, wanted: Wanted) -> bytes:
        """Return an object; a lease that could not be renewed is tried again with the next one."""
        with suppress(StoreError):
            await self._lease.hold(*self._needed, wanted=self._wanted)
        return await self._objects.fetch(wanted)


async def all_leases(store: ObjectStore, keys: ChainKeys) -> list[ReaderLease]:
    """Return every lease there is, expired ones too.

    Raise `IntegrityError` for one that cannot be read: who deletes must not guess what its reader needs.
    """
    found = await store.list(keys.readers)
    if len(found) > MAX_READERS:
        msg = f"{keys.readers} has {len(found)} leases, more than {MAX_READERS}; delete those of readers that are gone"
        raise IntegrityError(msg)
    leases = [await _read(store, key) for key in found]
    return [lease for lease in leases if lease is not None]


def live_leases(
    leases: Iterable[ReaderLease], *, now: float, heard: Mapping[str, float] | None = None
) -> list[ReaderLease]:
    """Return those that have not expired, or were renewed since they were `heard` of, whatever their clocks say.

    `heard` has the end of each lease, by reader, as of an earlier look.
    """
    return [
        lease
        for lease in leases
        if lease.expires > now or (heard is not None and heard.get(lease.reader) != lease.expires)
    ]


async def read_leases(store: ObjectStore, keys: ChainKeys, *, now: float) -> list[ReaderLease]:
    """Return the leases that have not expired at a moment; errors as in `all_leases`."""
    return live_leases(await all_leases(store, keys), now=now)


async def read_peers(store: ObjectStore, keys: ChainKeys, *, cluster: str, now: float) -> list[ReaderLease]:
    """Return the leases of a cluster's readers that serve objects; what cannot be read is left out."""
    leases: list[ReaderLease] = []
    for key in (await store.list(keys.readers))[:MAX_READERS]:
        with suppress(StoreError):
            lease = await _read(store, key)
            if lease is not None and lease.cluster == cluster and lease.address and lease.expires > now:
                leases.append(lease)
    return leases


async def _read(store: ObjectStore, key: str) -> ReaderLease | None:
    """Return a lease, or None when it was given back meanwhile."""
    advice = "delete it if no reader has that name"
    try:
        data = await store.get(key, max_bytes=MAX_LEASE_BYTES)
        return decode_record(data, ReaderLease, key, known=1, advice=advice)
    except ObjectMissingError:
        return None
