# pyright: basic, reportArgumentType=false
"""Which sampler a request goes to, and that it moves on from one that is slow, dead or about to leave."""

import asyncio

import pytest

from etude.errors import SamplerError, VersionUnavailableError
from etude.gateway.conversation import Conversation
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.sessions import ModelCall, Session
from etude.interfaces import SessionSpec
from etude.sampling.client import SamplerClient
from etude.sampling.decode_loop import Held
from etude.sampling.doubles import FakeEngine
from etude.sampling.router import SamplerRouter
from etude.sampling.sampler import EngineSampler
from etude.sampling.seats import ELSEWHERE, Seat, Terms
from etude.sampling.service import serving
from etude.types import Completion, FinishReason, SampleRequest, SamplerStatus, SamplingParams, VersionRun


class Scripted:
    """Answers after `takes_s` with a token of its own; a gate may hold it up."""

    def __init__(self, token=1, *, takes_s=0.0, version=0, gate=None):
        self.token, self.takes_s, self.version, self.gate = token, takes_s, version, gate
        self.asked = asyncio.Event()
        self.seen, self.answered, self.cancelled, self.draining = [], [], [], False

    async def sample(self, request):
        self.seen.append(request.request_id)
        self.asked.set()
        try:
            await asyncio.sleep(self.takes_s)
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        behind = request.min_version is not None and self.version < request.min_version
        if behind or request.exact_version not in (None, self.version):
            raise VersionUnavailableError(f"holds {self.version}")
        self.answered.append(request.request_id)
        return Completion(
            token_ids=(self.token,),
            sampler_logprobs=bytes(4),
            versions=(VersionRun(self.version, 1),),
            finish_reason=FinishReason.LENGTH,
            pool="p",
        )

    async def status(self):
        return [
            SamplerStatus(
                sampler_id="s",
                pool="p",
                view="fp32",
                lineage="l",
                version=self.version,
                digest="",
                draining=self.draining,
            )
        ]


def ask(name, session="", **fields):
    params = SamplingParams(max_tokens=4)
    return SampleRequest(request_id=name, session_id=session or name, prompt_ids=(1,), params=params, **fields)


async def ask_many(router, count, prefix="r"):
    await asyncio.gather(*[router.sample(ask(f"{prefix}{number}")) for number in range(count)])


def test_the_cost_is_seconds_times_price_times_distance():
    seat = Seat(Scripted(), Terms(price=3.0, region="eu"), outstanding=1, token_s=0.5)
    assert seat.cost(region="eu", fastest=9.0) == 2 * 0.5 * 3.0
    assert seat.cost(region="us", fastest=9.0) == 2 * 0.5 * 3.0 * ELSEWHERE
    assert seat.cost(region="", fastest=9.0) == 2 * 0.5 * 3.0
    assert replace_seat(seat, token_s=0.0).cost(region="eu", fastest=0.25) == 2 * 0.25 * 3.0


def replace_seat(seat, **changes):
    return Seat(seat.replica, seat.terms, **{"outstanding": seat.outstanding, "token_s": seat.token_s, **changes})


@pytest.mark.parametrize(
    ("terms", "shares"),
    [
        ((Terms(), Terms()), (6, 6)),
        ((Terms(price=1.0), Terms(price=2.0)), (8, 4)),
        ((Terms(region="here"), Terms(region="there")), (7, 5)),
        ((Terms(price=2.0, region="here"), Terms(price=1.0, region="there")), (5, 7)),
    ],
)
async def test_load_is_shared_by_price_and_place(terms, shares):
    gate = asyncio.Event()
    replicas = [Scripted(gate=gate), Scripted(gate=gate)]
    router = SamplerRouter(region="here")
    for replica, term in zip(replicas, terms, strict=True):
        router.add(replica, term)
    tasks = [asyncio.ensure_future(router.sample(ask(str(number)))) for number in range(12)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert tuple(len(replica.seen) for replica in replicas) == shares


async def test_a_request_goes_to_a_replica_that_is_known_to_hold_its_version():
    old, new = Scripted(1, version=3), Scripted(2, version=4)
    router = SamplerRouter([old, new])
    await router.status()
    for number in range(4):
        assert (await router.sample(ask(f"a{number}", exact_version=3))).token_ids == (1,)
        assert (await router.sample(ask(f"b{number}", min_version=4))).token_ids == (2,)
    assert (len(old.seen), len(new.seen)) == (4, 4)
    old.version = 5
    assert (await router.sample(ask("c", min_version=5))).token_ids == (1,), "what is known may be out of date"
    with pytest.raises(VersionUnavailableError):
        await router.sample(ask("d", exact_version=3))


async def test_a_session_stays_where_its_prefix_is_although_another_one_is_cheaper():
    near, cheap = Scripted(1), Scripted(2)
    router = SamplerRouter([near])
    await router.sample(ask("a", "s"))
    router.add(cheap, Terms(price=0.9))
    for number in range(3):
        assert (await router.sample(ask(f"b{number}", "s"))).token_ids == (1,)
    assert (await router.sample(ask("c", "other"))).token_ids == (2,)


async def test_a_request_that_takes_far_too_long_is_asked_of_another_and_answered_once():
    slow, fast = Scripted(1, gate=asyncio.Event()), Scripted(2)
    router = SamplerRouter([slow], hedge_s=0.05)
    task = asyncio.ensure_future(router.sample(ask("a", "s")))
    await asyncio.sleep(0)
    router.add(fast)
    assert (await asyncio.wait_for(task, 5)).token_ids == (2,)
    assert (slow.seen, slow.cancelled, slow.answered, fast.seen) == (["a"], ["a"], [], ["a"])
    assert router.hedged == 1
    assert (await router.sample(ask("b", "s"))).token_ids == (2,), "the session has moved"


async def test_the_first_answer_counts_and_a_failure_of_one_is_none_of_both():
    gate = asyncio.Event()
    slow, broken = Scripted(1, gate=gate), Scripted(2, version=0)

    async def fail(request):
        broken.asked.set()
        raise SamplerError("gone")

    broken.sample = fail
    router = SamplerRouter([slow], hedge_s=0.05)
    task = asyncio.ensure_future(router.sample(ask("a")))
    await asyncio.sleep(0)
    router.add(broken)
    await broken.asked.wait()
    gate.set()
    assert (await asyncio.wait_for(task, 5)).token_ids == (1,)


async def test_whoever_stops_waiting_takes_both_requests_back():
    replicas = [Scripted(gate=asyncio.Event()), Scripted(gate=asyncio.Event())]
    router = SamplerRouter(replicas, hedge_s=0.02)
    task = asyncio.ensure_future(router.sample(ask("a")))
    await asyncio.gather(*[replica.asked.wait() for replica in replicas])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert all(replica.cancelled == ["a"] for replica in replicas)


async def test_a_replica_that_drains_keeps_its_sessions_and_gets_no_new_ones():
    leaving, staying = Scripted(1, takes_s=0.02), Scripted(2, takes_s=0.02)
    router = SamplerRouter([leaving])
    await router.sample(ask("a", "old"))
    router.add(staying, Terms(price=1.5))
    leaving.draining = True
    await router.status()
    await ask_many(router, 5)
    assert leaving.seen == ["a"]
    assert (await router.sample(ask("b", "old"))).token_ids == (1,)
    router.discard(leaving)
    assert (await router.sample(ask("c", "old"))).token_ids == (2,)
    router.discard(staying)
    router.add(leaving)
    await router.status()
    assert (await router.sample(ask("d", "new"))).token_ids == (1,), "one that is to leave is better than none"


async def test_a_sampler_process_that_was_told_to_leave_says_so_to_whoever_routes():
    held = Held(lineage="l", version=0, digest="")
    samplers = [
        EngineSampler(FakeEngine(), sampler_id=name, pool="p", view="fp32", held=held)
        for name in ("leaving", "staying")
    ]
    async with (
        samplers[0],
        samplers[1],
        serving(samplers[0]) as first,
        serving(samplers[1]) as second,
        SamplerClient(first) as leaving,
        SamplerClient(second) as staying,
    ):
        router = SamplerRouter([leaving])
        await router.sample(ask("a", "old"))
        router.add(staying, Terms(price=1000.0))
        await leaving.leave()
        assert [status.draining for status in await router.status()] == [True, False]
        await ask_many(router, 5)
        await router.sample(ask("b", "old"))
        drawn = [(await client.status())[0].tokens_drawn for client in (leaving, staying)]
    assert drawn == [8, 20]


async def test_a_request_that_moved_on_is_one_node_of_its_session():
    tokenizer = byte_tokenizer()

    class Late(ScriptedSampler):
        async def sample(self, request):
            await asyncio.sleep(0.15)
            return await super().sample(request)

    async def unshielded(request):
        # A replica that answers all the same, though nobody listens any more.
        return await asyncio.shield(asyncio.ensure_future(late.sample(request)))

    late, prompt = Late(["late"] * 3, tokenizer=tokenizer), ScriptedSampler(["a", "b"], tokenizer=tokenizer)
    mute = Scripted()
    mute.sample = unshielded
    router = SamplerRouter([mute], hedge_s=0.02)
    params = SamplingParams(max_tokens=9)
    spec = SessionSpec(session_id="s", purpose="train", seed=0, params=params, max_calls=9, max_session_tokens=99)
    session = Session(spec, sampler=router, renderer=ChatMLRenderer(tokenizer), context_length=500, call_timeout_s=60.0)
    user = {"role": "user", "content": "hi"}
    call = ModelCall(conversation=Conversation(messages=(user,)), body_key="k")
    task = session.submit(call)
    await asyncio.sleep(0)
    router.add(prompt)
    answer = await asyncio.wait_for(task, 5)
    await asyncio.sleep(0.2)
    record = await session.close()
    assert answer.message["content"] == "a"
    assert len(record.nodes) == 1
    assert [request.request_id for request in (*late.requests, *prompt.requests)] == ["s/0", "s/0"]
