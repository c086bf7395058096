# pyright: basic
"""The S3 path against server processes; what all stores have in common is in test_store_contract.py."""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from obstore.store import S3Store
from s3_kit import enter

from etude.errors import ObjectExistsError, ObjectMissingError, StoreError
from etude.store.opening import open_store
from etude.store.remote import RemoteStore
from etude.telemetry.rows import read_rows
from etude.telemetry.sink import StoreSink


@pytest.fixture
def store(endpoint, monkeypatch, request):
    enter(endpoint, monkeypatch)
    return open_store(f"s3://bucket/runs/{request.node.name}")


async def test_what_is_missing_is_named_with_its_bucket(store):
    with pytest.raises(ObjectMissingError, match="'missing' in s3://bucket"):
        await store.get("missing")


async def test_rows_of_metrics_reach_a_bucket(store):
    sink = StoreSink(store, "metrics/trainer")
    for step in range(3):
        sink.record({"step": step, "version": step})
        await sink.flush()
    assert [row["step"] for row in await read_rows(store, "metrics")] == [0, 1, 2]


async def test_a_bucket_that_does_not_exist_is_an_error_with_its_url(store, endpoint):
    with pytest.raises(StoreError, match="s3://nowhere"):
        await open_store("s3://nowhere/run").put("k", b"")


@pytest.fixture
def real(seaweed, monkeypatch, request):
    """A bucket of a server whose conditional writes are for several writers."""
    enter(seaweed, monkeypatch)
    return open_store(f"s3://bucket/runs/{request.node.name}")


def call_from_threads(number: int) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(number))


async def test_one_of_sixteen_first_writers_wins_every_time(real):
    call_from_threads(16)
    for attempt in range(3):
        key = f"lock-{attempt}"
        writes = (real.put(key, b"by %d" % n, create_only=True) for n in range(16))
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert results.count(None) == 1
        assert all(result is None or isinstance(result, ObjectExistsError) for result in results), results
        assert await real.get(key) == b"by %d" % results.index(None)


async def test_no_count_of_eight_workers_is_lost(real):
    call_from_threads(8)
    await real.put("counter", b"0")

    async def count(worker: int) -> None:
        for number in range(10):
            while True:
                current = await real.get("counter")
                mine = b"%d %d-%d" % (int(current.split()[0]) + 1, worker, number)
                if await real.compare_and_swap("counter", mine, expected=current):
                    break

    await asyncio.gather(*(count(worker) for worker in range(8)))
    assert (await real.get("counter")).split()[0] == b"80"


@pytest.mark.parametrize("server", ["endpoint", "seaweed"])
async def test_a_swap_of_an_object_that_vanished_meanwhile_is_refused(server, request, monkeypatch):
    class Vanishing(RemoteStore):
        def _read(self, *args, **kwargs):
            found = super()._read(*args, **kwargs)
            self._backend.delete("head")
            return found

    enter(request.getfixturevalue(server), monkeypatch)
    store = Vanishing(S3Store("bucket", prefix="vanishing"), name="vanishing")
    await store.put("head", b"1")
    assert not await store.compare_and_swap("head", b"2", expected=b"1")
    with pytest.raises(ObjectMissingError):
        await store.get("head")


UPLOAD = """
import asyncio, sys
from etude.store.opening import open_store
from etude.store.remote import RemoteStore
asyncio.run(open_store(sys.argv[1]).put("big", bytes(96 << 20)))
"""


async def test_an_upload_that_dies_half_way_leaves_no_object(real, seaweed):
    sent, half_way, connections = 0, asyncio.Event(), set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limit: int) -> None:
        nonlocal sent
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
            sent += len(data)
            if sent > limit:
                half_way.set()
                await asyncio.Event().wait()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        there, back = await asyncio.open_connection("127.0.0.1", int(seaweed.rsplit(":", 1)[1]))
        try:
            await asyncio.gather(pump(reader, back, limit=60 << 20), pump(there, writer, limit=1 << 40))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (back, writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with proxy:
        endpoint = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", UPLOAD, real.name, env=os.environ | {"AWS_ENDPOINT_URL": endpoint}
        )
        async with asyncio.timeout(60):
            await half_way.wait()
        child.kill()
        await child.wait()
        for connection in connections:
            connection.cancel()
        await asyncio.wait(connections)
    with pytest.raises(ObjectMissingError):
        await real.get("big")
    assert await real.list("") == []
    data = os.urandom(1 << 20) * 40
    await real.put("big", data)
    assert await real.get("big") == data
    assert await real.get_range("big", len(data) - 5, 5) == data[-5:]
