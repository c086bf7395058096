# pyright: basic
"""The S3 path against a server process."""

import pytest
from s3_kit import ENVIRONMENT

from etude.errors import ObjectMissingError, StoreError
from etude.store.opening import open_store
from etude.telemetry.rows import read_rows
from etude.telemetry.sink import StoreSink


@pytest.fixture
def store(endpoint, monkeypatch, request):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
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
