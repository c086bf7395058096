# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""A sampler is the first witness of what it drew, and with which weights."""

import asyncio
from typing import Any

import pytest
from sampling_kit import Weights, reached, request, sampler

from etude.errors import SamplerError, StoreError
from etude.sampling.doubles import FakeEngine
from etude.telemetry.digests import of_drawn, of_ids
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import Applied, Drawn
from etude.types import FinishReason


class SlowLedger(MemoryLedger):
    """A ledger whose disk takes facts only when it is told to."""

    def __init__(self):
        super().__init__()
        self.asked = asyncio.Event()
        self.takes = asyncio.Event()

    async def flush_local(self):
        self.asked.set()
        await self.takes.wait()


class FullLedger(MemoryLedger):
    """A ledger whose disk is full."""

    async def flush_local(self):
        raise StoreError("the disk is full")


def facts(ledger, kind) -> list[Any]:
    return [fact for fact in ledger.events if isinstance(fact, kind)]


async def test_the_weights_served_are_told_from_the_first_ones_on():
    ledger = MemoryLedger()
    async with sampler(FakeEngine(), ledger=ledger) as served:
        await served.stage(Weights(version=4, digest="d4"))
        await served.stage(Weights(version=4, digest="d4"))
        await served.stage(Weights(version=0, lineage="m", digest="e0"))
    told = [(fact.lineage, fact.version, fact.digest, fact.view) for fact in facts(ledger, Applied)]
    assert told == [("l", 3, "d3", "fp32"), ("l", 4, "d4", "fp32"), ("m", 0, "e0", "fp32")]


async def test_each_completion_is_told_once_with_what_it_holds():
    ledger = MemoryLedger()
    async with sampler(FakeEngine(), ledger=ledger) as served:
        asked = [request(f"s/{number}", range(number + 1), max_tokens=5, seed=number) for number in range(3)]
        drawn = [await served.sample(one) for one in (*asked, asked[0])][:3]
    told = facts(ledger, Drawn)
    assert [fact.request for fact in told] == ["s/0", "s/1", "s/2"]
    for fact, one, completion in zip(told, asked, drawn, strict=True):
        assert (fact.prompt, fact.prompt_digest) == (len(one.prompt_ids), of_ids(one.prompt_ids))
        assert (fact.tokens, fact.digest) == (5, of_drawn(completion))
        assert (fact.versions, fact.lineage) == (((3, 5),), "l")


async def test_weights_are_told_before_what_is_drawn_with_them():
    ledger = MemoryLedger()
    async with sampler(FakeEngine(step_s=0.001), ledger=ledger) as served:
        running = asyncio.ensure_future(served.sample(request("s/0", (1,), max_tokens=200)))
        await reached(served, running=1)
        await served.stage(Weights(version=4))
        completion = await running
    assert [type(fact) for fact in ledger.events] == [Applied, Applied, Drawn]
    [drawn] = facts(ledger, Drawn)
    assert [fact.version for fact in facts(ledger, Applied)] == [3, 4]
    assert drawn.versions == tuple((run.version, run.count) for run in completion.versions)
    assert [version for version, _ in drawn.versions] == [3, 4]


async def test_a_cancelled_completion_with_tokens_is_told_and_one_without_is_not():
    ledger = MemoryLedger()
    async with sampler(FakeEngine(step_s=0.001, max_batch=1), ledger=ledger) as served:
        running = asyncio.ensure_future(served.sample(request("s/0", (1,), max_tokens=900)))
        waiting = asyncio.ensure_future(served.sample(request("s/1", (1,), max_tokens=900)))
        await reached(served, running=1, waiting=1)
        served.cancel("s/1")
        assert not (await waiting).token_ids
        served.cancel("s/0")
        completion = await running
    assert completion.finish_reason is FinishReason.CANCELLED
    told = [(fact.request, fact.tokens, fact.digest) for fact in facts(ledger, Drawn)]
    assert told == ([("s/0", len(completion.token_ids), of_drawn(completion))] if completion.token_ids else [])


async def test_nobody_gets_a_completion_before_the_disk_has_the_fact():
    ledger = SlowLedger()
    async with sampler(FakeEngine(), ledger=ledger) as served:
        asked = asyncio.ensure_future(served.sample(request("s/0", (1,), max_tokens=3)))
        await ledger.asked.wait()
        assert [fact.request for fact in facts(ledger, Drawn)] == ["s/0"]
        assert not asked.done()
        ledger.takes.set()
        assert len((await asked).token_ids) == 3


async def test_a_disk_that_takes_no_facts_lets_no_completion_out():
    async with sampler(FakeEngine(), ledger=FullLedger()) as served:
        with pytest.raises(SamplerError, match="full"):
            await served.sample(request("s/0", (1,), max_tokens=3))


async def test_a_ledger_that_refuses_a_fact_ends_the_sampler_with_its_reason():
    class Refusing(MemoryLedger):
        def record(self, event):
            if isinstance(event, Drawn):
                raise StoreError("cannot write the ledger to /full")

    async with sampler(FakeEngine(), ledger=Refusing()) as served:
        with pytest.raises(SamplerError, match="cannot write the ledger to /full"):
            await served.sample(request("s/0", (1,), max_tokens=3))
        with pytest.raises(SamplerError, match="cannot write the ledger to /full"):
            await served.watch()
