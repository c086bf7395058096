# pyright: basic
"""Whose request is worked on next."""

import asyncio

from etude.gateway.turns import BURST_S, HEAVY_SHARE, SHARE, Turns


class Loop:
    """Time that passes when work is done or the loop waits."""

    def __init__(self):
        self.began = asyncio.get_running_loop().time()
        self.worked = 0.0
        self.passed = 0.0
        self.turns = Turns(now=self, worked=lambda: self.worked)
        self.done = []

    def __call__(self):
        return asyncio.get_running_loop().time() - self.began + self.worked + self.passed

    async def work(self, name, seconds):
        async with self.turns.turn(name):
            self.worked += seconds
            self.done.append(name)

    def begin(self, name, seconds):
        return asyncio.create_task(self.work(name, seconds))


async def test_a_session_that_took_more_than_its_share_goes_after_the_others_and_not_all_the_time():
    loop = Loop()
    await loop.work("greedy", BURST_S + 0.1)
    await loop.work("modest", 0.001)
    began = loop()
    waiting = [loop.begin("greedy", 0.02) for _ in range(3)] + [loop.begin("honest", 0.001) for _ in range(3)]
    await asyncio.gather(*waiting)
    assert loop.done[2:] == ["honest"] * 3 + ["greedy"] * 3
    assert loop() - began >= 2 * 0.02 / HEAVY_SHARE


async def test_what_a_session_took_is_forgiven_with_time():
    loop = Loop()
    await loop.work("greedy", 2 * BURST_S)
    loop.passed += 2 * BURST_S / SHARE
    await loop.work("other", 0.0)
    waiting = [loop.begin("greedy", 0.001) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert all(task.done() for task in waiting)


async def test_a_session_that_is_alone_waits_for_nobody():
    loop = Loop()
    loop.passed += 10.0
    for _ in range(50):
        await loop.work("alone", 0.2)
    assert loop() - loop.worked - loop.passed < 1.0


async def test_whoever_stops_waiting_leaves_the_turn_to_the_next():
    loop = Loop()
    await loop.work("greedy", BURST_S + 0.1)
    await loop.work("modest", 0.001)
    await loop.work("greedy", 0.001)
    gone, kept = loop.begin("greedy", 0.0), loop.begin("greedy", 0.0)
    await asyncio.sleep(0)
    assert loop.turns.waiting == 2
    gone.cancel()
    await asyncio.wait_for(kept, 1)
    given, kept = loop.begin("greedy", 0.0), loop.begin("greedy", 0.0)
    given.get_loop().call_later(0.0, given.cancel)
    await asyncio.wait_for(kept, 1)
    assert loop.turns.waiting == 0


async def test_the_account_of_a_session_that_is_over_is_closed():
    loop = Loop()
    await loop.work("greedy", 2 * BURST_S)
    loop.turns.forget("greedy")
    await loop.work("other", 0.001)
    await asyncio.wait_for(loop.work("greedy", 0.001), 1)
