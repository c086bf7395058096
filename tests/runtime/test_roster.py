# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false
"""Samplers that lie, hang or lag are taken out of service, replaced, and the others go on."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from supervisor_kit import sampler_program, supervised

from etude.errors import RunError, SamplerError
from etude.runtime.inspection import Expected, Observation, defect, slow, suspicion
from etude.runtime.roster import Roster
from etude.runtime.services import read_leases
from etude.sampling.router import SamplerRouter
from etude.telemetry.events import Quarantined
from etude.types import SampleRequest, SamplerStatus, SamplingParams
from etude.weight_types import Head

HEAD = Head(lineage="l", version=3, digest="d3", anchor=0)
A = Expected(sampler_id="a-0", pool="p", view="fp32")
STATUS = SamplerStatus(sampler_id="a-0", pool="p", view="fp32", lineage="l", version=3, digest="d3")


def status(**changes):
    return SamplerStatus(**{name: getattr(STATUS, name) for name in STATUS.__struct_fields__} | changes)


def observed(*looks, head=HEAD):
    """An observation of a sampler that came up at second 0, from its answers by the second."""
    seen = Observation(now=0, answered_at=0, followed_at=0, stepped_at=0, well_at=0)
    for now, answer in looks:
        seen.note(answer, head, now)
    return seen


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ([(1, status(pool="q"))], "is a-0 of pool q in fp32, not what was started"),
        ([(1, status(view="fp8"))], "not what was started"),
        ([(1, status(digest="other"))], "holds other weights than version 3 of lineage l"),
        ([(1, status(version=2)), (22, status(version=2))], "stays at version 2 of lineage l while the head is 3"),
        ([(1, status(lineage="k")), (22, status(lineage="k"))], "stays at version 3 of lineage k"),
        ([(1, status(running=1, steps=5)), (12, status(running=1, steps=5))], "has taken no decoding step for 10 s"),
        ([(1, status(fault="bytes differ")), (12, status(fault="bytes differ"))], "does not recover: bytes differ"),
    ],
)
def test_what_a_sampler_must_be_replaced_for(looks, words):
    assert words in defect(observed(*looks), A, HEAD, patience_s=10)


@pytest.mark.parametrize(
    "looks",
    [
        [],
        [(1, status())],
        [(1, status(version=2)), (20, status(version=2))],
        [(1, status(version=0)), (19, status(version=1)), (38, status(version=2))],
        [(1, status(running=1, steps=5)), (9, status(running=1, steps=6)), (18, status(running=1, steps=7))],
        [(1, status(steps=5)), (60, status(steps=5))],
        [(1, status(fault="bytes differ")), (9, status(fault="bytes differ"))],
        [(1, None), (60, None)],
        [(1, status(version=2, running=1, fault="bytes differ")), (60, None)],
        [(1, status(version=2, running=1)), (60, None), (61, status(version=2, running=1))],
    ],
)
def test_what_is_no_reason_to_replace_it(looks):
    assert defect(observed(*looks), A, HEAD, patience_s=10) == ""


def test_nobody_is_behind_a_head_that_cannot_be_read():
    assert defect(observed((1, status(version=2)), (99, status(version=2)), head=None), A, None, patience_s=10) == ""


def test_silence_and_a_fault_of_its_own_are_reasons_to_ask_others_meanwhile():
    assert suspicion(observed((1, status()), (7, None)), patience_s=10) == "has not answered for 5 s"
    assert suspicion(observed((1, status(fault="bytes differ"))), patience_s=10) == "bytes differ"
    assert suspicion(observed((1, status()), (5, None)), patience_s=10) == ""


def test_only_who_is_slow_beyond_reason_is_called_slow():
    assert list(slow({"a": 0.01, "b": 0.012, "c": 2.0})) == ["c"]
    assert slow({"a": 0.01, "b": 0.4}) == {}
    assert slow({"a": 9.0}) == {}
    assert slow({"a": 9.0, "b": 0.0}) == {}


@asynccontextmanager
async def serving(tmp_path, *, proof=None, patience_s=5.0, head=HEAD, **told):
    """A router over two samplers, of which `a-0` is told to misbehave."""

    async def read_head():
        return head

    names = ("a-0", "b-0")
    # The supervisor must not be the first to notice.
    async with supervised(tmp_path, lease_s=30) as one:
        roster = Roster(
            SamplerRouter(patience_s=30),
            one.supervisor,
            expected={name: Expected(sampler_id=name, pool="p", view="fp32") for name in names},
            read_head=read_head,
            look_s=0.05,
            patience_s=patience_s,
            ledger=one.ledger,
            note=one.notes.append,
            proof=proof,
        )
        async with roster:
            one.supervisor.start(sampler_program(tmp_path, "a-0", **told))
            one.supervisor.start(sampler_program(tmp_path, "b-0"))
            yield roster, roster._router, one


def request(number, tokens=5):
    return SampleRequest(
        request_id=str(number), session_id=str(number), prompt_ids=(1, number), params=SamplingParams(max_tokens=tokens)
    )


def quarantined(one):
    return [(event.sampler, event.reason) for event in one.ledger.events if isinstance(event, Quarantined)]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"says": {"digest": "other"}}, "holds other weights than version 3 of lineage l"),
        ({"says": {"pool": "q"}}, "is a-0 of pool q in fp32, not what was started"),
    ],
)
async def test_a_sampler_that_is_not_what_it_should_be_is_replaced_while_the_other_serves(tmp_path, told, words):
    async with serving(tmp_path, **told) as (roster, router, one):
        await one.heard.until("down")
        assert quarantined(one) == [("a-0", words)]
        assert f"sampler a-0 is quarantined: it {words}" in one.notes
        assert (await router.sample(request(1))).pool == "p"
        await one.heard.until("up", 3)
        await roster.complete(owner="test", deadline_s=30)
        assert {answer.digest for answer in await router.status()} == {"d3"}
    assert len(quarantined(one)) == 1


async def test_a_sampler_whose_engine_hangs_loses_no_request(tmp_path):
    async with serving(tmp_path, hangs=True, patience_s=1.0) as (roster, router, one):
        await roster.complete(owner="test", deadline_s=30)
        completions = await asyncio.gather(*(router.sample(request(number, 30)) for number in range(8)))
        assert [len(completion.token_ids) for completion in completions] == [30] * 8
    assert quarantined(one) == [("a-0", "has taken no decoding step for 1 s")]


async def test_a_sampler_that_is_silent_for_a_moment_serves_again_in_the_same_life(tmp_path):
    async with serving(tmp_path, patience_s=0.6) as (roster, router, one):
        await roster.complete(owner="test", deadline_s=30)
        silent = roster.client("a-0")
        pid = next(lease.pid for lease in await leases_of(one, 2) if lease.name == "a-0")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: [replica for replica, _ in router.quarantined] == [silent])
        assert [answer.sampler_id for answer in await router.status()] == ["b-0"]
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not router.quarantined)
        assert len(await router.status()) == 2
        assert roster.client("a-0") is silent
    assert quarantined(one) == [("a-0", "has not answered for 0.3 s")]
    assert "sampler a-0 serves again" in one.notes


async def test_a_sampler_serves_only_once_it_has_proven_itself(tmp_path):
    tried = []

    async def proof(name, client):
        tried.append(name)
        await client.status()
        if tried.count("a-0") == 1 and name == "a-0":
            raise SamplerError("token 3 differs")

    async with serving(tmp_path, proof=proof) as (roster, router, one):
        await roster.complete(owner="test", deadline_s=30)
        assert len(await router.status()) == 2
    assert sorted(tried) == ["a-0", "a-0", "b-0"]
    assert quarantined(one) == [("a-0", "did not prove itself: token 3 differs")]


async def test_when_samplers_do_not_come_it_is_said_who_waited(tmp_path):
    async def never(_name, _client):
        await asyncio.Event().wait()

    async with serving(tmp_path, proof=never) as (roster, _, one):
        await one.heard.until("up", 2)
        with pytest.raises(RunError, match=r"etude run waited 0\.1 s for all samplers"):
            await roster.complete(owner="etude run", deadline_s=0.1)


async def leases_of(one, count):
    async with asyncio.timeout(30):
        while True:
            found = [lease for lease in await read_leases(one.store) if lease.url]
            if len(found) == count:
                return found
            await asyncio.sleep(0.02)


async def until(holds):
    """Wait until something holds that other processes bring about, and of which nobody tells."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
