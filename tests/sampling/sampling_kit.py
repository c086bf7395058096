# pyright: basic
"""Tiny policies, requests and samplers that the tests of this room share."""

import asyncio

import msgspec
import numpy as np
import torch

from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.sampling.decode_loop import Held
from etude.sampling.sampler import EngineSampler
from etude.types import SampleRequest, SamplingParams

VOCAB = 96


def shape(model_type, **changes):
    sizes = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 48,
        "qk_norm": model_type.startswith("qwen3"),
        "max_context": 128,
    }
    if model_type == "qwen3_moe":
        sizes |= {"ffn_hidden": 0, "experts": 6, "experts_per_token": 2, "expert_hidden": 24, "norm_topk": True}
    return PolicyShape(**(sizes | changes))


def decoder(policy_shape, seed=0):
    made = random_policy(policy_shape, seed)
    with torch.no_grad():
        for name, tensor in made.hf_tensors().items():
            if not name.endswith("norm.weight"):
                tensor.mul_(12)  # far from uniform, so that a wrong token shows
    return made


def request(name, prompt, session="", **params):
    return SampleRequest(
        request_id=name, session_id=session or name, prompt_ids=tuple(prompt), params=SamplingParams(**params)
    )


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, VOCAB, rng.integers(1, 40))) for _ in range(count)]


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Staged weights, as a follower would hand them over."""

    version: int
    lineage: str = "l"
    digest: str = "d"
    tensors: dict = {}


def sampler(engine, **options):
    held = Held(lineage="l", version=3, digest="d3")
    return EngineSampler(engine, sampler_id="s0", pool="local", view="fp32", held=held, **options)


async def until(holds):
    """Wait until an awaited condition holds; another thread or process makes it so, and offers no event."""
    async with asyncio.timeout(10):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def reached(served, **counts):
    async def holds():
        (status,) = await served.status()
        return all(getattr(status, name) == count for name, count in counts.items())

    await until(holds)
