# pyright: basic
import msgspec
import pytest

from etude.errors import IntegrityError
from etude.store.opening import open_store
from etude.weights.chain import WEIGHTS
from etude.weights.leases import LeaseKeeper, ReaderLease, live_leases, read_leases, read_peers


class Counting:
    """A store that counts what is written."""

    def __init__(self) -> None:
        self._inner = open_store("memory://")
        self.puts = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def get(self, key, *, max_bytes=None):
        return await self._inner.get(key, max_bytes=max_bytes)

    async def put(self, key, data, *, create_only=False):
        self.puts += 1
        await self._inner.put(key, data, create_only=create_only)

    async def compare_and_swap(self, key, data, *, expected):
        return await self._inner.compare_and_swap(key, data, expected=expected)

    async def list(self, prefix):
        return await self._inner.list(prefix)

    async def delete(self, key):
        await self._inner.delete(key)


async def test_a_lease_is_written_when_it_is_needed_and_renewed_at_half_its_time():
    store, now = Counting(), [1000.0]
    lease = LeaseKeeper(store, keys=WEIGHTS, reader="r", ttl_s=100.0, wall=lambda: now[0])
    assert not lease.covers("one", 5)
    await lease.hold("one", 5, wanted=6)
    assert lease.covers("one", 5)
    assert lease.covers("one", 9)
    assert not lease.covers("one", 4)
    assert not lease.covers("two", 5)
    now[0] += 49
    await lease.hold("one", 7, wanted=8)
    assert store.puts == 1
    now[0] += 2
    await lease.hold("one", 7, wanted=8)
    assert store.puts == 2
    await lease.hold("one", 3, wanted=8)
    assert store.puts == 3
    (found,) = await read_leases(store, WEIGHTS, now=now[0])
    assert found == ReaderLease(reader="r", lineage="one", version=3, wanted=8, expires=now[0] + 100)
    assert await read_leases(store, WEIGHTS, now=now[0] + 101) == []
    await lease.release()
    assert await read_leases(store, WEIGHTS, now=now[0]) == []
    assert not lease.covers("one", 9)


@pytest.mark.parametrize("name", ["../head", "a/b", "a" * 65, ".x", "é"])
def test_a_reader_has_a_plain_name(name):
    with pytest.raises(ValueError, match="plain name"):
        LeaseKeeper(open_store("memory://"), keys=WEIGHTS, reader=name)


async def test_peers_are_those_of_the_cluster_that_serve_and_what_is_damaged_is_left_out():
    store = open_store("memory://")
    for reader, cluster, address in (("a", "x", "http://10.0.0.1:1"), ("b", "y", "http://10.0.0.2:1"), ("c", "x", "")):
        lease = LeaseKeeper(store, keys=WEIGHTS, reader=reader, cluster=cluster, address=address, wall=lambda: 0.0)
        await lease.hold("one", 0, wanted=0)
    await store.put(WEIGHTS.reader("torn"), b'{"reader":"to')
    assert [lease.reader for lease in await read_peers(store, WEIGHTS, cluster="x", now=1.0)] == ["a"]
    assert await read_peers(store, WEIGHTS, cluster="x", now=301.0) == []
    with pytest.raises(IntegrityError, match=r"torn\.json is damaged"):
        await read_leases(store, WEIGHTS, now=1.0)


async def test_a_lease_that_is_huge_is_refused_unread():
    store = open_store("memory://")
    lease = ReaderLease(reader="r", lineage="x" * 5000, version=0, wanted=0, expires=9e9)
    await store.put(WEIGHTS.reader("r"), msgspec.json.encode(lease))
    with pytest.raises(Exception, match="more than the 4096"):
        await read_leases(store, WEIGHTS, now=0.0)
    assert await read_peers(store, WEIGHTS, cluster="", now=0.0) == []


@pytest.mark.parametrize("jump", [-7200.0, -200.0, 7200.0])
async def test_a_lease_is_renewed_in_time_whatever_happens_to_the_clock(jump):
    store, real, offset = Counting(), [1e9], [0.0]
    lease = LeaseKeeper(store, keys=WEIGHTS, reader="r", ttl_s=300.0, wall=lambda: real[0] + offset[0])
    await lease.hold("one", 5, wanted=5)
    offset[0] = jump
    renewed = real[0]
    for _ in range(60):
        real[0] += 10.0
        before = store.puts
        await lease.hold("one", 5, wanted=5)
        if store.puts > before:
            assert real[0] - renewed <= 160.0
            renewed = real[0]
    assert real[0] - renewed <= 160.0


async def test_a_lease_that_was_renewed_is_live_whatever_its_reader_takes_for_the_time():
    leases = [
        ReaderLease(reader=name, lineage="one", version=0, wanted=0, expires=expires)
        for name, expires in (("sound", 1200.0), ("slow", 40.0), ("gone", 30.0), ("new", 20.0))
    ]
    assert [lease.reader for lease in live_leases(leases, now=1000.0)] == ["sound"]
    heard = {"sound": 1200.0, "slow": 10.0, "gone": 30.0}
    assert [lease.reader for lease in live_leases(leases, now=1000.0, heard=heard)] == ["sound", "slow", "new"]
