# pyright: basic, reportArgumentType=false
"""Which calls are one call, and for how long."""

import asyncio

import pytest

from etude.gateway.refusals import CallRefusedError
from etude.gateway.replays import Replays


class Hours:
    now = 0.0

    def __call__(self):
        return self.now


def replays(**options):
    clock = Hours()
    return Replays(num_bytes=len, now=clock, **options), clock


async def answered(kept, text, *, body="b", key=""):
    async def draw():
        return text

    task = asyncio.create_task(draw())
    kept.add(task, body_key=body, idempotency_key=key)
    await task
    await asyncio.sleep(0)
    return text


def found(kept, body="b", *, key="", retry=True):
    return kept.find(body_key=body, idempotency_key=key, is_retry=retry)


def again(kept, body="b", **options):
    """Return the answer that a call is a repetition of; None when it is a call of its own."""
    future = found(kept, body, **options)
    return None if future is None else future.result()


async def test_a_marked_repetition_is_found_and_an_unmarked_one_is_not():
    kept, _ = replays()
    first = await answered(kept, "a")
    assert again(kept) == first
    assert again(kept, retry=False) is None
    second = await answered(kept, "b")
    assert again(kept) == second, "the newest call of a body is the one that is repeated"
    assert kept.count == 2


async def test_a_call_in_flight_is_joined_however_long_it_takes():
    kept, clock = replays(most_calls=1)
    gate = asyncio.Event()
    task = asyncio.create_task(gate.wait())
    kept.add(task, body_key="b", idempotency_key="")
    clock.now = 10_000.0
    assert found(kept) is task
    gate.set()
    await task


async def test_a_key_is_bound_to_its_body_for_as_long_as_it_is_kept():
    kept, clock = replays(keep_s=600.0)
    first = await answered(kept, "a", key="k")
    assert again(kept, key="k", retry=False) == first
    assert again(kept) == first, "a marked retry may have lost its key"
    with pytest.raises(CallRefusedError) as refusal:
        again(kept, "other", key="k")
    assert (refusal.value.status, refusal.value.code) == (400, "idempotency_key_reused")
    clock.now = 600.1
    assert again(kept, "other", key="k") is None
    assert again(kept) is None


async def test_only_so_many_answers_and_bytes_are_kept_and_the_oldest_go_first():
    kept, _ = replays(most_calls=3)
    for number in range(5):
        await answered(kept, "a", body=str(number))
    assert [again(kept, str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    kept, _ = replays(most_bytes=10)
    for number in range(3):
        await answered(kept, "a" * 4, body=str(number))
    assert [again(kept, str(number)) is not None for number in range(3)] == [False, True, True]
    await answered(kept, "a" * 11, body="large")
    assert again(kept, "large") is None


async def test_what_failed_is_forgotten_and_an_older_answer_does_not_take_its_name_along():
    kept, clock = replays()
    await answered(kept, "a")
    clock.now = 300.0

    async def fail():
        raise ValueError

    task = asyncio.create_task(fail())
    kept.add(task, body_key="b", idempotency_key="k")
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert again(kept, key="k") is None
    assert again(kept) is None
    second = await answered(kept, "b")
    clock.now = 700.0
    assert again(kept) == second
