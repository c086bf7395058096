# pyright: basic
"""The lean forward is the network that transformers builds from the same directory."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.policy.decoder import Decoder
from etude.policy.files import load_policy, random_policy, save_policy
from etude.policy.shape import PolicyShape, RopeScaling

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 48,
}
STRETCH = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)
MOE: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_hidden": 16}
SHAPES = {
    "llama": PolicyShape(model_type="llama", **BASE, tie_embeddings=True),
    "llama3": PolicyShape(model_type="llama", **BASE, rope_scaling=STRETCH),
    "mistral": PolicyShape(model_type="mistral", **BASE),
    "qwen2": PolicyShape(model_type="qwen2", **BASE, attention_bias=True),
    "qwen3": PolicyShape(model_type="qwen3", **BASE, qk_norm=True),
    "qwen3_moe": PolicyShape(model_type="qwen3_moe", **(BASE | {"ffn_hidden": 0}), **MOE, qk_norm=True, norm_topk=True),
}


def rough_policy(shape: PolicyShape) -> Decoder:
    """Weights large and uneven enough that a wrong norm, bias or rotation shows."""
    decoder = random_policy(shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    for tensor in decoder.hf_tensors().values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return decoder


def logits_of(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    encoded = decoder(token_ids, torch.arange(len(token_ids)), [0, len(token_ids)])
    return encoded.hidden @ decoder.head.T


@pytest.mark.parametrize("name", SHAPES)
def test_saved_policies_give_the_same_logits_in_transformers(name, tmp_path):
    decoder = rough_policy(SHAPES[name])
    save_policy(decoder, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    token_ids = torch.randint(0, 97, (41,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
        torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_directories_that_transformers_wrote_are_read(name, tmp_path):
    save_policy(rough_policy(SHAPES[name]), tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    decoder = load_policy(tmp_path / "theirs")
    original = load_policy(tmp_path / "ours").hf_tensors()
    for key, tensor in decoder.hf_tensors().items():
        assert torch.equal(tensor, original[key]), key
    assert decoder.shape == SHAPES[name]
