# pyright: basic
"""Weights that did not arrive are seen by the sampler that should hold them."""

import asyncio

import pytest
from sampling_kit import Weights, decoder, prompts, reached, request, sampler, shape

from etude.errors import SamplerError
from etude.policy.digest import held_digest
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.faulty import EngineFaults, FaultyEngine
from etude.types import SamplingParams, ScoreRequest

MADE, OTHER, THIRD = (decoder(shape("qwen3_moe"), seed=seed) for seed in range(3))
PROMPT = prompts(1, seed=4)[0]


def faulty(**faults):
    engine = TorchEngine(MADE.shape, MADE.hf_tensors(), max_batch=4)
    return FaultyEngine(engine, EngineFaults(**faults), held=MADE.hf_tensors())


async def test_an_update_that_is_lost_once_is_made_again():
    async with sampler(faulty(lost_updates=1)) as served:
        await served.stage(Weights(version=4, tensors=OTHER.hf_tensors()))
        (status,) = await served.status()
    assert (status.version, status.held, status.fault) == (4, held_digest(OTHER.hf_tensors()), "")
    assert status.swaps == 2


@pytest.mark.parametrize("faults", [{"lost_updates": 2}, {"lost_tensors": ("model.layers.1.self_attn.o_proj.weight",)}])
async def test_a_sampler_whose_engine_keeps_losing_updates_serves_nothing_until_one_arrives(faults):
    engine = faulty(**faults)
    async with sampler(engine) as served:
        await served.sample(request("before", PROMPT, max_tokens=2))
        await served.stage(Weights(version=4, tensors=OTHER.hf_tensors()))
        (status,) = await served.status()
        assert "an update was lost" in status.fault
        assert status.held != held_digest(OTHER.hf_tensors())
        with pytest.raises(SamplerError, match="an update was lost"):
            await served.sample(request("a", PROMPT, max_tokens=2))
        engine.faults = EngineFaults()
        await served.stage(Weights(version=5, tensors=THIRD.hf_tensors()))
        (status,) = await served.status()
        assert (status.held, status.fault) == (held_digest(THIRD.hf_tensors()), "")
        assert (await served.sample(request("b", PROMPT, max_tokens=2))).versions[0].version == 5


async def test_what_was_running_when_an_update_was_lost_fails_instead_of_mixing():
    async with sampler(faulty(lost_updates=2)) as served:
        running = served.sample(request("long", PROMPT, max_tokens=80))
        task = asyncio.ensure_future(running)
        await reached(served, running=1)
        await served.stage(Weights(version=4, tensors=OTHER.hf_tensors()))
        with pytest.raises(SamplerError, match="an update was lost"):
            await task


async def test_scoring_runs_beside_requests_under_one_version():
    async with sampler(faulty()) as served:
        asked = ScoreRequest(token_ids=PROMPT, drawn_from=1, params=SamplingParams(top_p=1.0, top_k=0))
        before = await served.score(asked)
        await served.stage(Weights(version=4, tensors=OTHER.hf_tensors()))
        after = await served.score(asked)
    assert (before.version, after.version) == (3, 4)
    assert before.logprobs != after.logprobs
