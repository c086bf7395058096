# pyright: basic
"""What every store promises: the same tests over a directory, memory, a failing store and S3 servers."""

import asyncio

import pytest
from s3_kit import enter

from etude.errors import ObjectExistsError, ObjectMissingError, StoreError
from etude.store.opening import open_store, probe_conditional_writes


@pytest.fixture(params=["file", "memory", "faulty", "moto", "seaweed"])
def store(request, tmp_path, monkeypatch):
    if request.param == "file":
        return open_store(f"file://{tmp_path}/run%20one")
    if request.param == "memory":
        return open_store("memory://")
    if request.param == "faulty":
        return open_store(f"faulty+file://{tmp_path}?fail=0.05&lost_reply=0.05")
    enter(request.getfixturevalue("endpoint" if request.param == "moto" else "seaweed"), monkeypatch)
    return open_store(f"s3://bucket/contract/{request.node.name}")


async def test_what_was_put_is_read_back_and_listed_by_folder(store):
    for key in ("a/b", "a/bc/d", "ab/c", "top"):
        await store.put(key, key.encode())
    assert await store.get("a/bc/d") == b"a/bc/d"
    assert await store.list("a") == await store.list("a/") == ["a/b", "a/bc/d"]
    assert await store.list("") == ["a/b", "a/bc/d", "ab/c", "top"]
    assert await store.list("nothing/here") == []


async def test_a_missing_object_is_named(store):
    for call in (
        store.get("weights/head"),
        store.get_range("weights/head", 0, 1),
        store.get_if_changed("weights/head", tag=None),
    ):
        with pytest.raises(ObjectMissingError, match="weights/head"):
            await call


async def test_a_deleted_object_is_gone_and_deleting_it_again_is_nothing(store):
    await store.put("a/b", b"1")
    await store.delete("a/b")
    await store.delete("a/b")
    with pytest.raises(ObjectMissingError):
        await store.get("a/b")


async def test_a_write_once_object_keeps_its_first_bytes(store):
    await store.put("k", b"first", create_only=True)
    with pytest.raises(ObjectExistsError):
        await store.put("k", b"second", create_only=True)
    assert await store.get("k") == b"first"


async def test_a_swap_needs_the_bytes_it_expects(store):
    assert not await store.compare_and_swap("head", b"1", expected=b"0")
    assert await store.compare_and_swap("head", b"1", expected=None)
    assert not await store.compare_and_swap("head", b"2", expected=None)
    assert not await store.compare_and_swap("head", b"2", expected=b"0")
    assert await store.compare_and_swap("head", b"2", expected=b"1")
    assert await store.get("head") == b"2"


async def test_an_object_larger_than_allowed_is_refused(store):
    await store.put("big", bytes(1000))
    for call in (store.get("big", max_bytes=999), store.get_if_changed("big", tag=None, max_bytes=999)):
        with pytest.raises(StoreError, match="1000 bytes"):
            await call
    assert len(await store.get("big", max_bytes=1000)) == 1000


async def test_an_object_is_read_again_only_when_it_changed(store):
    await store.put("head", b"1")
    first, tag = await store.get_if_changed("head", tag=None)
    assert first == b"1"
    assert await store.get_if_changed("head", tag=tag) is None
    assert await store.compare_and_swap("head", b"2", expected=b"1")
    second, newer = await store.get_if_changed("head", tag=tag)
    assert second == b"2"
    assert newer != tag
    assert await store.get_if_changed("head", tag=newer) is None
    await store.delete("head")
    with pytest.raises(ObjectMissingError):
        await store.get_if_changed("head", tag=newer)


async def test_a_part_is_read_exactly_or_refused(store):
    await store.put("k", bytes(range(100)))
    assert await store.get_range("k", 0, 100) == bytes(range(100))
    assert await store.get_range("k", 99, 1) == b"\x63"
    assert await store.get_range("k", 10, 0) == b""
    for start, length in ((99, 2), (50, 1 << 40)):
        with pytest.raises(StoreError, match="'k'"):
            await store.get_range("k", start, length)


async def test_the_probe_accepts_a_store_that_honours_conditions(store):
    await probe_conditional_writes(store)
    await probe_conditional_writes(store)


async def test_one_of_many_first_writers_wins(store):
    writes = (store.put("lock", b"by %d" % n, create_only=True) for n in range(16))
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert all(result is None or isinstance(result, ObjectExistsError) for result in results), results
    assert results.count(None) == 1
    assert await store.get("lock") == b"by %d" % results.index(None)


async def test_no_count_is_lost_among_workers(store, request):
    await store.put("counter", b"0")

    async def count(worker: int) -> None:
        for number in range(5):
            while True:
                current = await store.get("counter")
                # A worker that finds its own bytes takes the swap for its own, so workers sign theirs.
                mine = b"%d %d-%d" % (int(current.split()[0]) + 1, worker, number)
                if await store.compare_and_swap("counter", mine, expected=current):
                    break

    await asyncio.gather(*(count(worker) for worker in range(8)))
    counted = int((await store.get("counter")).split()[0])
    # Whose swap happened without an answer, and was swapped over since, counts again.
    assert counted == 40 if "faulty" not in request.node.name else 40 <= counted < 60
