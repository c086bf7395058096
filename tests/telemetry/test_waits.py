# pyright: basic
"""Waits have names, owners and ends, and can be read while they last."""

import asyncio
from functools import partial

import pytest

from etude.errors import RunError, StoreError
from etude.telemetry.waits import current_waits, waiting

slot = partial(waiting, "a slot", owner="admit", on="trainer")


async def test_a_wait_is_listed_for_as_long_as_it_lasts():
    async with slot(deadline_s=60), waiting("a reply", owner="eval", on="sampler", deadline_s=5):
        first, second = current_waits()
        assert (first.name, first.owner, first.on) == ("a slot", "admit", "trainer")
        assert first.until - first.since == pytest.approx(60)
        assert (second.name, second.until - second.since) == ("a reply", pytest.approx(5))
        assert await asyncio.to_thread(current_waits) == (first, second)
    assert current_waits() == ()


async def test_a_wait_that_is_over_its_deadline_says_who_waited_for_whom():
    with pytest.raises(RunError, match=r"^admit waited 0\.01 s for a slot, which trainer did not bring$"):
        async with slot(deadline_s=0.01):
            await asyncio.Event().wait()
    with pytest.raises(StoreError):
        async with slot(deadline_s=0.01, error=StoreError):
            await asyncio.Event().wait()
    assert current_waits() == ()


async def test_what_goes_wrong_meanwhile_comes_through_as_it_is():
    for error in (TimeoutError("mine"), asyncio.CancelledError(), ZeroDivisionError()):
        with pytest.raises(type(error)) as caught:
            async with slot(deadline_s=60):
                raise error
        assert caught.value is error
    assert current_waits() == ()


async def test_whoever_is_cancelled_waits_no_more():
    listed = asyncio.Event()

    async def wait_for_long():
        async with slot(deadline_s=60):
            listed.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait_for_long())
    await listed.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert current_waits() == ()
