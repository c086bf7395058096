# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""A sampler stamps versions, swaps weights under running requests, and never draws an answer twice."""

import asyncio

import msgspec
import pytest
import torch
from sampling_kit import Weights, decoder, prompts, reached, request, sampler, shape

from etude.errors import (
    ContextOverflowError,
    SamplerBusyError,
    SampleRequestError,
    SamplerError,
    VersionUnavailableError,
)
from etude.policy.digest import held_digest
from etude.sampling.doubles import FakeEngine
from etude.sampling.engines.torch_engine import TorchEngine
from etude.types import FinishReason, VersionRun


async def test_a_swap_under_sixteen_requests_cancels_none_and_stamps_two_versions():
    made, other = decoder(shape("qwen3_moe")), decoder(shape("qwen3_moe"), seed=1)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=16)
    async with sampler(engine) as served:
        tasks = [
            asyncio.ensure_future(served.sample(request(str(i), p, max_tokens=80, seed=i)))
            for i, p in enumerate(prompts(16, seed=2))
        ]
        await reached(served, running=16)
        await served.stage(Weights(version=4, tensors=other.hf_tensors()))
        completions = await asyncio.gather(*tasks)
        (status,) = await served.status()
    for completion in completions:
        assert completion.finish_reason is FinishReason.LENGTH
        assert [run.version for run in completion.versions] == [3, 4]
        assert sum(run.count for run in completion.versions) == len(completion.token_ids) == 80
    assert (status.version, status.swaps, status.tokens_drawn) == (4, 1, 16 * 80)


async def test_tokens_after_a_swap_are_drawn_from_the_new_weights():
    made, other = decoder(shape("llama")), decoder(shape("llama"), seed=1)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    prompt = prompts(1, seed=4)[0]
    async with sampler(engine) as served:
        await served.stage(Weights(version=4, tensors=other.hf_tensors()))
        swapped = await served.sample(request("a", prompt, max_tokens=20))
    async with sampler(TorchEngine(other.shape, other.hf_tensors(), max_batch=1)) as served:
        wanted = await served.sample(request("a", prompt, max_tokens=20))
    assert swapped.token_ids == wanted.token_ids
    assert swapped.versions == (VersionRun(4, 20),)


async def test_staged_weights_may_change_after_they_were_handed_over():
    made, other = decoder(shape("llama")), decoder(shape("llama"), seed=1)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    handed = {name: tensor.clone() for name, tensor in other.hf_tensors().items()}
    commit = engine.stage(handed)
    with torch.no_grad():
        for tensor in handed.values():
            tensor.zero_()
    commit()
    assert engine.held_digest() == held_digest(other.hf_tensors())


async def test_the_same_request_id_is_answered_once_and_drawn_once():
    async with sampler(FakeEngine(step_s=0.001)) as served:
        one = request("a", (1, 2), max_tokens=20)
        first, second = await asyncio.gather(served.sample(one), served.sample(one))
        third = await served.sample(one)
        (status,) = await served.status()
        with pytest.raises(SampleRequestError, match="used for another request"):
            await served.sample(request("a", (1, 2, 3)))
    assert first == second == third
    assert status.tokens_drawn == 20


async def test_finished_completions_are_remembered_within_a_bound():
    async with sampler(FakeEngine(), remember_bytes=10_000) as served:
        for i in range(50):
            await served.sample(request(str(i), (1,), max_tokens=10))
        again = await served.sample(request("0", (1,), max_tokens=10))
        (status,) = await served.status()
    assert len(again.token_ids) == 10
    assert status.tokens_drawn == 510


@pytest.mark.parametrize("wish", [{"min_version": 4}, {"exact_version": 4}, {"exact_version": 2}])
async def test_a_version_that_is_not_held_is_refused_within_the_wait(wish):
    async with sampler(FakeEngine(), version_wait_s=0.05) as served:
        with pytest.raises(VersionUnavailableError, match="holds version 3"):
            await served.sample(msgspec.structs.replace(request("a", (1,)), **wish))


async def test_a_request_waits_for_the_version_that_is_about_to_come():
    async with sampler(FakeEngine()) as served:
        task = asyncio.ensure_future(
            served.sample(msgspec.structs.replace(request("a", (1,), max_tokens=5), min_version=4))
        )
        await reached(served, waiting=1)
        await served.stage(Weights(version=4))
        assert (await task).versions == (VersionRun(4, 5),)


async def test_a_request_for_exactly_one_version_keeps_it_and_the_swap_comes_after_it():
    async with sampler(FakeEngine(step_s=0.002)) as served:
        exact = msgspec.structs.replace(request("a", (1,), max_tokens=40), exact_version=3)
        task = asyncio.ensure_future(served.sample(exact))
        other = asyncio.ensure_future(served.sample(request("b", (1,), max_tokens=200)))
        await reached(served, running=2)
        stage = asyncio.ensure_future(served.stage(Weights(version=4)))
        assert (await task).versions == (VersionRun(3, 40),)
        await stage
        assert [run.version for run in (await other).versions] == [3, 4]


async def test_a_request_for_exactly_one_version_delays_a_swap_for_a_bounded_time():
    async with sampler(FakeEngine(step_s=0.002), swap_hold_s=0.05) as served:
        exact = msgspec.structs.replace(request("a", (1,), max_tokens=900), exact_version=3)
        task = asyncio.ensure_future(served.sample(exact))
        await reached(served, running=1)
        await served.stage(Weights(version=4))
        with pytest.raises(VersionUnavailableError, match="was kept for"):
            await task
        assert (await served.status())[0].version == 4


async def test_no_completion_mixes_lineages():
    async with sampler(FakeEngine(step_s=0.001)) as served:
        old = asyncio.ensure_future(served.sample(request("a", (1,), max_tokens=60)))
        await reached(served, running=1)
        stage = asyncio.ensure_future(served.stage(Weights(version=2, lineage="m")))
        new = asyncio.ensure_future(served.sample(request("b", (1,), max_tokens=5)))
        completions = await asyncio.gather(old, new)
        await stage
    assert {(c.lineage, c.versions) for c in completions} <= {
        ("l", (VersionRun(3, 60),)),
        ("l", (VersionRun(3, 5),)),
        ("m", (VersionRun(2, 5),)),
    }
    assert completions[0].lineage == "l"


async def test_versions_never_fall_within_a_lineage():
    async with sampler(FakeEngine()) as served:
        with pytest.raises(SamplerError, match="cannot follow"):
            await served.stage(Weights(version=2))


async def test_a_full_queue_refuses_instead_of_growing():
    async with sampler(FakeEngine(step_s=0.002, max_batch=1), max_queue=3) as served:
        tasks = [asyncio.ensure_future(served.sample(request(str(i), (1,), max_tokens=30))) for i in range(3)]
        await reached(served, running=1)
        with pytest.raises(SamplerBusyError):
            await served.sample(request("more", (1,)))
        await asyncio.gather(*tasks)
        await served.sample(request("more", (1,)))


async def test_cancelling_returns_what_was_drawn():
    async with sampler(FakeEngine(step_s=0.002, max_batch=1)) as served:
        task = asyncio.ensure_future(served.sample(request("a", (1,), max_tokens=900)))
        queued = asyncio.ensure_future(served.sample(request("b", (1,), max_tokens=900)))
        await reached(served, running=1)
        served.cancel("b")
        assert (await queued).token_ids == ()
        served.cancel("a")
        completion = await task
    assert completion.finish_reason is FinishReason.CANCELLED
    assert sum(run.count for run in completion.versions) == len(completion.token_ids) < 900


async def test_a_request_that_nobody_waits_for_any_more_is_given_up():
    async with sampler(FakeEngine(step_s=0.002)) as served:
        task = asyncio.ensure_future(served.sample(request("a", (1,), max_tokens=900)))
        await reached(served, running=1)
        task.cancel()
        await reached(served, running=0)


async def test_draining_finishes_what_runs_and_refuses_the_rest():
    async with sampler(FakeEngine(step_s=0.001)) as served:
        short = asyncio.ensure_future(served.sample(request("a", (1,), max_tokens=20)))
        long = asyncio.ensure_future(served.sample(request("b", (1,), max_tokens=100_000)))
        await reached(served, running=2)
        await served.drain(0.2)
        assert (await short).finish_reason is FinishReason.LENGTH
        assert (await long).finish_reason is FinishReason.CANCELLED or len((await long).token_ids) == 1023
        with pytest.raises(SamplerError, match="draining"):
            await served.sample(request("c", (1,)))


async def test_an_engine_failure_fails_every_request_and_whoever_watches():
    async with sampler(FakeEngine(breaks_after=5)) as served:
        tasks = [asyncio.ensure_future(served.sample(request(str(i), (1,), max_tokens=90))) for i in range(4)]
        watch = asyncio.ensure_future(served.watch())
        results = await asyncio.gather(*tasks, watch, return_exceptions=True)
        assert all(isinstance(result, SamplerError) and "the engine failed" in str(result) for result in results)
        with pytest.raises(SamplerError, match="scripted engine breaks"):
            await served.status()
        with pytest.raises(SamplerError):
            await served.sample(request("late", (1,)))


async def test_requests_that_make_no_sense_are_refused_before_the_engine_sees_them():
    async with sampler(FakeEngine(max_context=64)) as served:
        for params in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}):
            with pytest.raises(SampleRequestError):
                await served.sample(request("a", (1,), **params))
        with pytest.raises(ContextOverflowError):
            await served.sample(request("b", (1,) * 64))
