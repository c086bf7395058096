# pyright: basic
import pytest
import torch

from etude.policy.initial import initial_policy
from etude.policy.shape import PolicyShape

SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=50, hidden=32, layers=3, heads=2, kv_heads=1, head_dim=16, ffn_hidden=32,
    experts=4, experts_per_token=2, expert_hidden=16, norm_topk=True, qk_norm=True, max_context=64,
)  # fmt: skip
TOKENS = torch.arange(40) % 50


def test_a_seed_decides_every_weight():
    one, same, other = (initial_policy(SHAPE, seed).hf_tensors() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_first_prediction_is_uniform():
    decoder = initial_policy(SHAPE, 0)
    hidden = decoder(TOKENS, torch.arange(40), [0, 40]).hidden
    assert torch.isfinite(hidden).all()
    assert torch.count_nonzero(hidden @ decoder.head.T) == 0


def test_routers_start_near_even():
    weights = initial_policy(SHAPE, 0).hf_tensors()
    routers = [tensor for name, tensor in weights.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == SHAPE.layers
    assert all(router.std().item() == pytest.approx(0.02, rel=0.5) for router in routers)
