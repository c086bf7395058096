# pyright: basic
import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, ObjectExistsError, ObjectMissingError, StoreError
from etude.store.faulty import Faults, FaultyStore
from etude.store.local import FileStore
from etude.store.opening import open_store
from etude.store.retrying import RetryingStore


class Skipping:
    """A clock on which waiting takes no time."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        del seconds


def retrying(inner, **faults) -> RetryingStore:
    faulty = FaultyStore(inner, clock=Skipping(), faults=Faults(**faults), seed=1)
    return RetryingStore(faulty, clock=Skipping(), attempts=40)


@given(seed=st.integers(0, 1000), fail=st.floats(0.0, 0.4), lost=st.floats(0.0, 0.4))
def test_every_call_ends_as_on_a_sound_store(seed, fail, lost, tmp_path_factory):
    async def check() -> None:
        inner = FileStore(tmp_path_factory.mktemp("store"))
        faulty = FaultyStore(
            inner, clock=Skipping(), faults=Faults(fail=fail, lost_reply=lost, lost_swap=0.1), seed=seed
        )
        store = RetryingStore(faulty, clock=Skipping(), attempts=60)
        await store.put("a/1", b"one", create_only=True)
        with pytest.raises(ObjectExistsError):
            await RetryingStore(inner, clock=Skipping()).put("a/1", b"other", create_only=True)
        assert await store.get("a/1") == b"one"
        assert await store.list("a/") == ["a/1"]
        await store.put("a/1", b"two")
        assert await inner.get("a/1") == b"two"
        await store.delete("a/1")
        with pytest.raises(ObjectMissingError):
            await store.get("a/1")

    asyncio.run(check())


async def test_a_swap_that_happened_without_an_answer_counts_as_won(tmp_path):
    inner = FileStore(tmp_path)
    store = retrying(inner, lost_reply=0.7)
    for number in range(20):
        expected = str(number - 1).encode() if number else None
        assert await store.compare_and_swap("head", str(number).encode(), expected=expected)
    assert await inner.get("head") == b"19"


async def test_a_swap_whose_condition_does_not_hold_stays_lost(tmp_path):
    inner = FileStore(tmp_path)
    await inner.put("head", b"theirs")
    assert not await retrying(inner, fail=0.3).compare_and_swap("head", b"mine", expected=None)
    assert await inner.get("head") == b"theirs"


async def test_a_store_that_stays_broken_is_reported_with_the_number_of_attempts(tmp_path):
    store = RetryingStore(
        FaultyStore(FileStore(tmp_path), clock=Skipping(), faults=Faults(fail=1.0)), clock=Skipping(), attempts=3
    )
    with pytest.raises(StoreError) as caught:
        await store.get("a")
    assert "after 3 attempts" in caught.value.__notes__


async def test_a_url_opens_a_faulty_store(tmp_path):
    store = open_store(f"faulty+file://{tmp_path}?fail=0.2&lost_reply=0.1")
    await store.put("a", b"1")
    assert await FileStore(tmp_path).get("a") == b"1"


@pytest.mark.parametrize("query", ["fail=2", "fail=x", "torn=0.1", "fail"])
def test_a_faulty_url_with_another_query_is_refused(tmp_path, query):
    with pytest.raises(ConfigError, match="faulty"):
        open_store(f"faulty+file://{tmp_path}?{query}")


async def test_a_call_that_is_never_answered_is_given_up_and_tried_again(tmp_path):
    faulty = FaultyStore(FileStore(tmp_path), clock=Skipping(), faults=Faults(mute=1.0))
    store = RetryingStore(faulty, clock=Skipping(), attempts=2, deadline_s=0.02)
    for call in (store.get("a", max_bytes=1), store.put("a", b""), store.list(""), store.get_range("a", 0, 1)):
        with pytest.raises(StoreError, match="no answer within") as caught:
            await call
        assert "after 2 attempts" in caught.value.__notes__


async def test_a_call_that_may_move_much_has_longer(tmp_path):
    class Slow(FileStore):
        async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
            await asyncio.sleep(0.1)
            await super().put(key, data, create_only=create_only)

    store = RetryingStore(Slow(tmp_path), clock=Skipping(), attempts=1, deadline_s=0.02)
    await store.put("large", bytes(1 << 20))
    with pytest.raises(StoreError, match="no answer"):
        await store.put("small", b"")
