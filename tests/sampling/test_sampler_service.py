# pyright: basic, reportArgumentType=false
"""Samplers over HTTP: typed errors, deadlines, and a router that loses nothing when one of them dies."""

import asyncio
import os
import signal
import socket
import sys

import aiohttp
import msgspec
import pytest
from sampling_kit import reached, request, sampler, until

from etude.errors import (
    ContextOverflowError,
    HostError,
    SamplerBusyError,
    SampleRequestError,
    SamplerError,
    VersionUnavailableError,
)
from etude.sampling.client import SamplerClient
from etude.sampling.doubles import FakeEngine
from etude.sampling.router import SamplerRouter
from etude.sampling.service import serving
from etude.types import Completion, FinishReason, SamplerStatus, SamplingParams, ScoreRequest

PROCESS = """
import asyncio
from etude.sampling.decode_loop import Held
from etude.sampling.doubles import FakeEngine
from etude.sampling.sampler import EngineSampler
from etude.sampling.service import serving

async def main():
    held = Held(lineage="l", version=3, digest="d3")
    engine = FakeEngine(step_s=0.002)
    async with EngineSampler(engine, sampler_id="child", pool="p", view="fp32", held=held) as served:
        async with serving(served) as url:
            print(url, flush=True)
            await served.watch()

asyncio.run(main())
"""


async def test_a_completion_survives_the_wire_bit_for_bit():
    one = request("a", (1, 2, 3), max_tokens=20)
    async with sampler(FakeEngine()) as served, serving(served) as url, SamplerClient(url) as client:
        assert await client.sample(one) == await served.sample(one)
        assert await client.status() == await served.status()
        asked = ScoreRequest(token_ids=(1, 2, 3), drawn_from=1, params=SamplingParams())
        assert await client.score(asked) == await served.score(asked)


async def test_every_refusal_arrives_as_the_error_it_was():
    async with (
        sampler(FakeEngine(max_context=64, step_s=0.005), max_queue=1, version_wait_s=0.0) as served,
        serving(served) as url,
        SamplerClient(url) as client,
    ):
        with pytest.raises(ContextOverflowError):
            await client.sample(request("a", (1,) * 64))
        with pytest.raises(VersionUnavailableError):
            await client.sample(msgspec.structs.replace(request("b", (1,)), min_version=9))
        with pytest.raises(SampleRequestError):
            await client.sample(request("c", (1,), top_p=2.0))
        running = asyncio.ensure_future(client.sample(request("d/?#", (1,), max_tokens=40)))
        await reached(client, running=1)
        with pytest.raises(SamplerBusyError):
            await client.sample(request("e", (1,)))
        await client.cancel("d/?#")
        assert (await running).finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("body", [b"", b"{}", b"\x80", os.urandom(2000)])
async def test_a_body_that_is_no_request_is_refused(body):
    async with (
        sampler(FakeEngine()) as served,
        serving(served) as url,
        aiohttp.ClientSession() as http,
        http.post(url + "/sample", data=body) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"] == "SampleRequestError"


async def test_a_port_in_use_is_said_so():
    async with sampler(FakeEngine()) as served, serving(served) as url:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(HostError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serving(served, port=port):
                pass


async def test_a_client_that_is_closed_fails_calls_under_way_and_later_ones_as_any_lost_sampler_does():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = SamplerClient(f"http://127.0.0.1:{mute.getsockname()[1]}")
        under_way = asyncio.ensure_future(client.sample(request("a", (1,))))
        connection, _ = await asyncio.to_thread(mute.accept)
        await client.close()
        connection.close()
        for call in (under_way, client.status(), client.sample(request("b", (1,)))):
            with pytest.raises(SamplerError):
                await asyncio.wait_for(call, 5.0)


async def test_a_mute_server_is_given_up_by_the_deadline():
    # The kernel accepts the connection; nobody ever reads it.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with SamplerClient(url, timeout_s=0.2, status_timeout_s=0.2) as client, asyncio.timeout(5):
            with pytest.raises(SamplerError, match=r"no answer to /sample within 0\.2 s"):
                await client.sample(request("a", (1,)))
            with pytest.raises(SamplerError, match="no answer to /health"):
                await client.status()


async def test_the_service_says_that_its_engine_failed():
    async with sampler(FakeEngine(breaks_after=2)) as served, serving(served) as url, SamplerClient(url) as client:
        with pytest.raises(SamplerError, match="the engine failed"):
            await client.sample(request("a", (1,)))
        with pytest.raises(SamplerError, match="the engine failed"):
            await client.status()


async def test_killing_one_of_two_sampler_processes_loses_no_request():
    async def spawn():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        return process, (await process.stdout.readline()).decode().strip()

    (victim, first), (survivor, second) = await asyncio.gather(spawn(), spawn())
    try:
        async with SamplerClient(first) as a, SamplerClient(second) as b:
            router = SamplerRouter([a, b])
            requests = [request(str(i), (1, i), max_tokens=60, seed=i) for i in range(24)]
            tasks = [asyncio.ensure_future(router.sample(one)) for one in requests]
            await asyncio.gather(*(until(lambda c=client: busy(c)) for client in (a, b)))
            victim.send_signal(signal.SIGKILL)
            completions = await asyncio.gather(*tasks)
            assert [len(completion.token_ids) for completion in completions] == [60] * 24
            async with sampler(FakeEngine()) as served:
                for one, completion in zip(requests, completions, strict=True):
                    assert completion.token_ids == (await served.sample(one)).token_ids
            assert len(await router.status()) == 1
    finally:
        for process in (victim, survivor):
            if process.returncode is None:
                process.kill()
            await process.wait()


async def busy(client):
    return (await client.status())[0].running > 0


class Scripted:
    """A replica that answers at once, or raises what it is told to."""

    def __init__(self, name, error=None, gate=None):
        self.name, self.error, self.gate, self.seen = name, error, gate, []

    async def sample(self, one):
        self.seen.append(one.request_id)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Completion(
            token_ids=(1,), sampler_logprobs=b"\0" * 4, versions=(), finish_reason=FinishReason.STOP, pool=self.name
        )

    async def status(self):
        return [SamplerStatus(sampler_id=self.name, pool="p", view="v", lineage="l", version=0, digest="d")]


async def seen(replica):
    while not replica.seen:  # noqa: ASYNC110 a turn of the loop is all it takes
        await asyncio.sleep(0)


async def test_a_session_stays_with_its_replica():
    replicas = [Scripted("a"), Scripted("b")]
    router = SamplerRouter(replicas)
    pools = {
        session: {(await router.sample(request(f"{session}{i}", (1,), session=session))).pool for i in range(5)}
        for session in ("s", "t", "u")
    }
    assert all(len(seen) == 1 for seen in pools.values())


async def test_load_goes_where_fewer_requests_wait():
    gate = asyncio.Event()
    slow, fast = Scripted("slow", gate=gate), Scripted("fast", gate=gate)
    router = SamplerRouter([slow, fast])
    tasks = [asyncio.ensure_future(router.sample(request(str(i), (1,)))) for i in range(10)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert len(slow.seen) == len(fast.seen) == 5


async def test_a_replica_without_the_version_is_passed_over_and_all_without_it_is_an_answer():
    old = Scripted("old", error=VersionUnavailableError("holds 3"))
    router = SamplerRouter([old, Scripted("new")])
    assert {(await router.sample(request(str(i), (1,)))).pool for i in range(4)} == {"new"}
    with pytest.raises(VersionUnavailableError):
        await SamplerRouter([old]).sample(request("a", (1,)))


async def test_a_prompt_too_long_is_not_tried_elsewhere():
    replicas = [Scripted("a", error=ContextOverflowError("long")), Scripted("b", error=ContextOverflowError("long"))]
    with pytest.raises(ContextOverflowError):
        await SamplerRouter(replicas).sample(request("a", (1,)))
    assert sum(len(replica.seen) for replica in replicas) == 1


async def test_the_router_counts_the_time_in_which_nobody_served_a_session():
    router = SamplerRouter(patience_s=60.0)
    asked = asyncio.ensure_future(router.sample(request("a", (1,), session="waits")))
    served = SamplerRouter([Scripted("well")])
    await served.sample(request("b", (1,), session="waits"))
    assert served.unserved_s("waits") == 0.0
    async with asyncio.timeout(10):
        while not router.unserved_s("waits"):  # noqa: ASYNC110 the router tells nobody
            await asyncio.sleep(0)
    before = router.unserved_s("waits")
    asked.cancel()
    await asyncio.wait({asked})
    assert router.unserved_s("waits") >= before > 0.0
    assert router.unserved_s("another") == 0.0


async def test_when_nobody_serves_the_router_gives_up_after_its_patience():
    with pytest.raises(SamplerError, match="no sampler served it within"):
        await SamplerRouter([Scripted("a", error=SamplerError("gone"))], patience_s=0.2).sample(request("a", (1,)))
    with pytest.raises(SamplerBusyError):
        await SamplerRouter([Scripted("a", error=SamplerBusyError("full"))], patience_s=0.2).sample(request("a", (1,)))


async def test_what_a_quarantined_replica_was_drawing_goes_to_another_one_and_its_state_counts_for_nothing():
    gate = asyncio.Event()
    hung, well = Scripted("hung", gate=gate), Scripted("well")
    router = SamplerRouter([hung])
    asked = asyncio.ensure_future(router.sample(request("a", (1,))))
    await seen(hung)
    router.add(well)
    router.quarantine(hung, "draws nothing")
    assert (await asked).pool == "well"
    assert [status.sampler_id for status in await router.status()] == ["well"]
    assert router.quarantined == ((hung, "draws nothing"),)
    assert {(await router.sample(request(str(i), (1,)))).pool for i in range(4)} == {"well"}
    gate.set()
    router.release(hung)
    assert len(await router.status()) == 2


async def test_a_request_waits_for_the_only_replica_to_come_back():
    lost, back = Scripted("lost", gate=asyncio.Event()), Scripted("back")
    router = SamplerRouter([lost])
    asked = asyncio.ensure_future(router.sample(request("a", (1,), session="s")))
    await seen(lost)
    router.discard(lost)
    await asyncio.sleep(0)
    router.add(back)
    assert (await asked).pool == "back"
    assert back.seen == ["a"]


async def test_whoever_gives_up_a_request_gives_it_up_for_good():
    hung = Scripted("hung", gate=asyncio.Event())
    router = SamplerRouter([hung])
    asked = asyncio.ensure_future(router.sample(request("a", (1,))))
    await seen(hung)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert hung.seen == ["a"]


async def test_a_version_that_is_still_to_come_is_waited_for():
    late = Scripted("late", error=VersionUnavailableError("holds 3"))
    router = SamplerRouter([late])
    asked = asyncio.ensure_future(router.sample(msgspec.structs.replace(request("a", (1,)), min_version=4)))
    await seen(late)
    late.error = None
    assert (await asked).pool == "late"
    late.error = VersionUnavailableError("holds 3")
    impatient = SamplerRouter([late], patience_s=0.1)
    with pytest.raises(VersionUnavailableError):
        await impatient.sample(msgspec.structs.replace(request("b", (1,)), min_version=4))
    impatient.quarantine(late, "it lies")
    with pytest.raises(SamplerError, match="all are quarantined: it lies"):
        await impatient.sample(request("c", (1,)))
