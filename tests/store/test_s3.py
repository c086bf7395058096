# pyright: basic
"""The S3 path against a server process."""

import asyncio

import pytest
from s3_kit import ENVIRONMENT

from etude.errors import ObjectExistsError, ObjectMissingError, StoreError
from etude.store.opening import open_store, probe_conditional_writes
from etude.telemetry.rows import read_rows
from etude.telemetry.sink import StoreSink


@pytest.fixture
def store(endpoint, monkeypatch, request):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return open_store(f"s3://bucket/runs/{request.node.name}")


async def test_a_bucket_behaves_as_a_directory_does(store):
    await store.put("a/b", b"1")
    await store.put("a/c", b"2", create_only=True)
    assert await store.get("a/b") == b"1"
    assert await store.list("a") == ["a/b", "a/c"]
    with pytest.raises(ObjectExistsError):
        await store.put("a/c", b"3", create_only=True)
    with pytest.raises(ObjectMissingError, match="'missing' in s3://bucket"):
        await store.get("missing")
    with pytest.raises(StoreError, match="1 bytes"):
        await store.get("a/b", max_bytes=0)


async def test_a_bucket_swaps_by_tag(store):
    await probe_conditional_writes(store)
    assert await store.compare_and_swap("head", b"1", expected=None)
    assert not await store.compare_and_swap("head", b"2", expected=b"0")
    assert not await store.compare_and_swap("head", b"2", expected=None)
    swapped = await asyncio.gather(*(store.compare_and_swap("head", b"by %d" % n, expected=b"1") for n in range(2)))
    assert sorted(swapped) == [False, True]
    assert await store.get("head") == b"by %d" % swapped.index(True)


async def test_rows_of_metrics_reach_a_bucket(store):
    sink = StoreSink(store, "metrics/trainer")
    for step in range(3):
        sink.record({"step": step, "version": step})
        await sink.flush()
    assert [row["step"] for row in await read_rows(store, "metrics")] == [0, 1, 2]


async def test_a_bucket_that_does_not_exist_is_an_error_with_its_url(store, endpoint):
    with pytest.raises(StoreError, match="s3://nowhere"):
        await open_store("s3://nowhere/run").put("k", b"")
