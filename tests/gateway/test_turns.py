# pyright: basic
"""Whose request is worked on next."""

import asyncio

from etude.gateway.turns import BURST_S, HEAVY_SHARE, SHARE, Turns


class Loop:
    """Time that passes when work is done or the loop waits."""

    def __init__(self):
        self.began = asyncio.get_running_loop().time()
        self.worked = 0.0

    def __call__(self):
        return asyncio.get_running_loop().time() - self.began + self.worked


async def work(turns, clock, name, seconds, done):
    async with turns.turn(name):
        clock.worked += seconds
        done.append(name)


async def test_requests_of_light_sessions_are_worked_on_one_at_a_time_in_their_order():
    clock, done = Loop(), []
    turns = Turns(now=clock)
    busy = []

    async def one(name):
        async with turns.turn(name):
            busy.append(name)
            assert len(busy) == 1
            await asyncio.sleep(0)
            busy.remove(name)
            done.append(name)

    names = [f"s{number}" for number in range(5)]
    await asyncio.gather(*[one(name) for name in names])
    assert done == names


async def test_a_session_that_took_more_than_its_share_goes_after_the_others_and_not_all_the_time():
    clock, done = Loop(), []
    turns = Turns(now=clock)
    await work(turns, clock, "greedy", BURST_S + 0.1, done)
    await work(turns, clock, "modest", 0.001, done)
    async with turns.turn("modest"):
        waiting = [asyncio.create_task(work(turns, clock, "greedy", 0.02, done)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(work(turns, clock, "honest", 0.001, done)) for _ in range(3)]
        await asyncio.sleep(0)
        done.clear()
    began = clock()
    await asyncio.gather(*waiting)
    assert done == ["honest"] * 3 + ["greedy"] * 3
    assert clock() - began >= 2 * 0.02 / HEAVY_SHARE


async def test_what_a_session_took_is_forgiven_with_time():
    clock, done = Loop(), []
    turns = Turns(now=clock)
    await work(turns, clock, "greedy", 2 * BURST_S, done)
    clock.worked += BURST_S / SHARE
    await work(turns, clock, "other", 0.0, done)
    async with asyncio.timeout(1):
        for _ in range(3):
            await work(turns, clock, "greedy", 0.001, done)


async def test_a_session_that_is_alone_waits_for_nobody():
    clock, done = Loop(), []
    turns = Turns(now=clock)
    clock.worked += 10.0
    for _ in range(50):
        await work(turns, clock, "alone", 0.2, done)
    assert clock() - clock.worked < 1.0


async def test_whoever_stops_waiting_leaves_the_turn_to_the_next():
    clock, done = Loop(), []
    turns = Turns(now=clock)
    async with turns.turn("a"):
        gone = asyncio.create_task(work(turns, clock, "b", 0.0, done))
        kept = asyncio.create_task(work(turns, clock, "c", 0.0, done))
        await asyncio.sleep(0)
        gone.cancel()
    await asyncio.wait_for(kept, 1)
    async with turns.turn("a"):
        gone = asyncio.create_task(work(turns, clock, "b", 0.0, done))
        kept = asyncio.create_task(work(turns, clock, "c", 0.0, done))
        await asyncio.sleep(0)
    # Given the turn already, and not there to take it.
    gone.cancel()
    await asyncio.wait_for(kept, 1)
    assert done == ["c", "c"]
    assert turns.waiting == 0
