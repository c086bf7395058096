# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import asyncio
import hashlib
import subprocess
import sys

import msgspec
import pytest
from aiohttp import ClientSession, web

from etude.errors import HostError, IntegrityError, StoreError
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock, SystemClock
from etude.weights.chain import WEIGHTS
from etude.weights.downloads import StoreObjects, Wanted
from etude.weights.host_cache import HostCache
from etude.weights.peers import PeerObjects, RecentObjects, check_address, owner_of, serving_objects


def wanted(data: bytes) -> Wanted:
    name = hashlib.sha256(data).hexdigest()
    return Wanted(key=WEIGHTS.object("one", name), name=name, size=len(data))


class Source:
    """Objects that are counted as they are fetched."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = {wanted(data).name: data for data in contents}
        self.fetched: list[str] = []

    async def fetch(self, wanted: Wanted) -> bytes:
        self.fetched.append(wanted.name)
        await asyncio.sleep(0)
        if wanted.name not in self.contents:
            raise StoreError("there is no such object")
        return self.contents[wanted.name]


async def test_processes_of_a_host_fetch_an_object_once(tmp_path):
    source = Source(b"a" * 100, b"b" * 100)
    caches = [HostCache(tmp_path, source, clock=SystemClock()) for _ in range(4)]
    for data in (b"a" * 100, b"b" * 100, b"a" * 100):
        assert await asyncio.gather(*(cache.fetch(wanted(data)) for cache in caches)) == [data] * 4
    assert len(source.fetched) == 2


async def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path):
    source = Source(b"a" * 100)
    cache = HostCache(tmp_path, source, clock=SystemClock())
    await cache.fetch(wanted(b"a" * 100))
    for damage in (b"", b"a" * 99, b"a" * 101, b"b" * 100):
        (tmp_path / wanted(b"a" * 100).name).write_bytes(damage)
        assert await cache.fetch(wanted(b"a" * 100)) == b"a" * 100
    assert len(source.fetched) == 5


async def test_what_lies_in_the_way_in_a_cache_only_costs_a_download(tmp_path):
    data = b"a" * 100
    source = Source(data)
    cache = HostCache(tmp_path, source, clock=SystemClock())
    (tmp_path / wanted(data).name).mkdir()
    assert await cache.fetch(wanted(data)) == data
    (tmp_path / wanted(data).name).rmdir()
    (tmp_path / "locks" / wanted(data).name[:2]).unlink()
    (tmp_path / "locks" / wanted(data).name[:2]).mkdir()  # as when the disk has no room for it
    assert await cache.fetch(wanted(data)) == data
    assert await cache.fetch(wanted(data)) == data
    assert len(source.fetched) == 2


def test_a_cache_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HostError, match=rf"cannot cache weights in {tmp_path}/file"):
        HostCache(tmp_path / "file", Source(), clock=SystemClock())


async def test_the_cache_stays_within_its_size_and_keeps_what_was_used_last(tmp_path):
    contents = [bytes([n]) * 100 for n in range(6)]
    source = Source(*contents, b"x" * 1000)
    cache = HostCache(tmp_path, source, clock=SystemClock(), max_bytes=300)
    (tmp_path / f"{'0' * 64}.123").write_bytes(b"left by a killed process")
    for data in contents:
        await cache.fetch(wanted(data))
        await cache.fetch(wanted(contents[0]))
        assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) <= 300
    assert source.fetched.count(wanted(contents[0]).name) <= 2
    assert await cache.fetch(wanted(b"x" * 1000)) == b"x" * 1000
    assert not (tmp_path / wanted(b"x" * 1000).name).exists()


async def test_a_lock_that_is_never_let_go_costs_its_wait_and_no_more(tmp_path):
    source = Source(b"a")
    holding, go = asyncio.Event(), asyncio.Event()

    class Stuck(Source):
        async def fetch(self, wanted):
            holding.set()
            await go.wait()
            return b"a"

    stuck = asyncio.create_task(HostCache(tmp_path, Stuck(), clock=SystemClock()).fetch(wanted(b"a")))
    await holding.wait()
    assert await HostCache(tmp_path, source, clock=ManualClock(), lock_s=1.0).fetch(wanted(b"a")) == b"a"
    go.set()
    await stuck


def test_each_reader_owns_its_part_and_few_objects_change_hands_when_one_leaves():
    names = [hashlib.sha256(bytes([n])).hexdigest() for n in range(200)]
    readers = ["a", "b", "c", "d"]
    owners = {name: owner_of(name, readers) for name in names}
    assert all(30 < list(owners.values()).count(reader) < 70 for reader in readers)
    assert owners == {name: owner_of(name, readers[::-1]) for name in names}
    for name, owner in owners.items():
        assert owner == "d" or owner_of(name, readers[:3]) == owner


async def test_readers_of_a_cluster_divide_a_download_and_pass_it_on():
    contents = [bytes([n]) * 1000 for n in range(40)]
    sources = [Source(*contents) for _ in range(3)]
    recent = [RecentObjects(source) for source in sources]
    async with (
        ClientSession() as session,
        serving_objects(recent[0], keys=WEIGHTS, max_bytes=1 << 20) as a,
        serving_objects(recent[1], keys=WEIGHTS, max_bytes=1 << 20) as b,
        serving_objects(recent[2], keys=WEIGHTS, max_bytes=1 << 20) as c,
    ):
        addresses = {"a": a, "b": b, "c": c}

        async def peers():
            return addresses

        readers = [
            PeerObjects(own, reader=name, peers=peers, session=session)
            for own, name in zip(recent, addresses, strict=True)
        ]
        for data in contents:
            assert await asyncio.gather(*(reader.fetch(wanted(data)) for reader in readers)) == [data] * 3
    assert sum(len(source.fetched) for source in sources) == 40
    assert all(6 < len(source.fetched) < 21 for source in sources)
    assert all(reader.refused == 0 for reader in readers)


@pytest.mark.parametrize("kind", ["gone", "lies", "too much", "slow", "redirects", "says no"])
async def test_a_peer_that_is_of_no_use_costs_one_attempt(kind):
    data = b"a" * 1000
    source = Source(data)
    release = asyncio.Event()

    async def answer(request):
        if kind == "slow":
            await release.wait()
        if kind == "redirects":
            raise web.HTTPFound("/elsewhere")
        if kind == "says no":
            raise web.HTTPNotFound
        return web.Response(body=b"b" * 1000 if kind == "lies" else b"a" * 5_000_000)

    application = web.Application()
    application.add_routes([web.get("/objects/{lineage}/{name}", answer)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    if kind == "gone":
        await runner.cleanup()
    other = next(f"r{n}" for n in range(99) if owner_of(wanted(data).name, ["me", f"r{n}"]) != "me")

    async def peers():
        return {other: address}

    async with ClientSession() as session:
        reader = PeerObjects(source, reader="me", peers=peers, session=session, patience_s=0.2)
        assert await reader.fetch(wanted(data)) == data
    assert (reader.refused, reader.from_peers, len(source.fetched)) == (1, 0, 1)
    release.set()
    await runner.cleanup()


@pytest.mark.parametrize(
    "address",
    [
        "http://example.com:80",
        "https://10.0.0.1:80",
        "http://10.0.0.1",
        "http://10.0.0.1:80/path",
        "http://u@10.0.0.1:80",
        "http://10.0.0.1:80?x",
        "file:///etc/passwd",
        "",
        "http://[::1",
        "http://10.0.0.1:999999",
    ],
)
def test_addresses_in_leases_name_a_host_and_a_port_and_nothing_else(address):
    with pytest.raises(IntegrityError, match="http://IP:PORT"):
        check_address(address)


def test_addresses_of_hosts_are_taken():
    assert check_address("http://10.0.0.1:80") == "http://10.0.0.1:80"
    assert check_address("http://[::1]:8080") == "http://[::1]:8080"


@pytest.mark.parametrize(
    "path",
    [
        "/objects/one/" + "0" * 63,
        "/objects/one/" + "0" * 64,
        "/objects/one/" + "0" * 64 + "?size=-1",
        "/objects/one/" + "0" * 64 + "?size=1000001",
        "/objects/one/" + "0" * 64 + "?size=" + "9" * 5000,
        "/objects/one/" + "0" * 64 + "?size=10",
        "/objects/..%2Fhead/" + "0" * 64 + "?size=10",
        "/objects/%2e%2e/" + "0" * 64 + "?size=10",
        "/head",
    ],
)
async def test_what_is_no_object_is_refused_by_its_server(path):
    objects = StoreObjects(open_store("memory://"))
    async with ClientSession() as session, serving_objects(objects, keys=WEIGHTS, max_bytes=1_000_000) as url:
        answer = await session.get(url + path)
        assert answer.status in (400, 404)


CLIENT = """
import asyncio, json, sys
from pathlib import Path
import msgspec
from etude.store.opening import open_store
from etude.telemetry.clock import SystemClock
from etude.weights.downloads import Wanted
from etude.weights.sources import open_source
url, reader, cache, cluster = sys.argv[1:]
wanted = msgspec.json.decode(sys.stdin.readline(), type=list[Wanted])
async def main():
    store = open_store(url)
    options = dict(clock=SystemClock(), reader=reader, cache=Path(cache) if cache else None, cluster=cluster)
    async with open_source(store, **options) as source:
        await source.lease.hold("one", 0, wanted=0)
        print("here", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for one in wanted:
            await source.objects.fetch(one)
        print(source.from_store.num_bytes, flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # goes on serving until everyone has what it wants
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["host", "cluster"])
def test_processes_pay_for_a_download_once(tmp_path, kind):
    url = str(tmp_path / "run")
    contents = [bytes([n]) * 100_000 for n in range(20)]
    for data in contents:
        asyncio.run(open_store(url).put(wanted(data).key, data))
    cache, cluster = (str(tmp_path / "cache"), "") if kind == "host" else ("", "here")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, url, f"r{n}", cache, cluster], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for n in range(3)
    ]

    def tell_all(line: bytes) -> None:
        for process in processes:
            process.stdin.write(line + b"\n")
            process.stdin.flush()

    tell_all(msgspec.json.encode([wanted(data) for data in contents]))
    assert [process.stdout.readline() for process in processes] == [b"here\n"] * 3
    tell_all(b"go")
    read = [int(process.stdout.readline()) for process in processes]
    tell_all(b"end")
    for process in processes:
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert sum(read) == sum(map(len, contents))
    assert asyncio.run(open_store(url).list("weights/readers")) == []
