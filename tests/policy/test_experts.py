# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false
import pytest
import torch

from etude.policy.experts import dense, mix_experts, route
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape

SCORES = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]])
SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=50, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn_hidden=0,
    experts=6, experts_per_token=2, expert_hidden=8, norm_topk=True, qk_norm=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("plausibility", "experts", "gates", "replaced"),
    [
        (0.0, [0, 2], [0.7273, 0.2727], 0),
        (0.4, [0, 2], [0.7273, 0.2727], 0),
        (0.6, [0, 1], [0.5714, 0.4286], 1),
        (1.0, [0, 1], [0.5714, 0.4286], 1),
    ],
)
def test_implausible_experts_give_way_to_the_routers_own(plausibility, experts, gates, replaced):
    routes = route(SCORES.log(), top_k=2, norm_topk=True, replay=torch.tensor([[0, 2]]), plausibility=plausibility)
    assert routes.experts.tolist() == [experts]
    torch.testing.assert_close(routes.gates, torch.tensor([gates]), atol=1e-4, rtol=0)
    assert int(routes.replaced) == replaced


def test_all_freed_slots_are_filled_best_first_without_doubles():
    routes = route(SCORES.log(), top_k=3, norm_topk=True, replay=torch.tensor([[1, 3, 4]]), plausibility=0.8)
    assert routes.experts.tolist() == [[0, 1, 2]]
    assert int(routes.replaced) == 2


def test_rows_without_a_route_use_the_routers_own_choice():
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    own = route(logits, top_k=2, norm_topk=True)
    replay = torch.full((5, 2), -1, dtype=torch.int16)
    replay[3] = torch.tensor([0, 1])
    found = route(logits, top_k=2, norm_topk=True, replay=replay, plausibility=0.0)
    assert found.experts[3].tolist() == [0, 1]
    others = [0, 1, 2, 4]
    assert torch.equal(found.experts[others], own.experts[others])
    assert torch.equal(found.gates[others], own.gates[others])


def mean_gradients(replay, *, checkpointed=False):
    decoder = random_policy(SHAPE, seed=3)
    decoder.checkpoint_activations = checkpointed
    token_ids = torch.arange(20) % 50
    positions = torch.cat((torch.arange(12), torch.arange(8)))
    encoded = decoder(token_ids, positions, [0, 12, 20], replay=replay)
    (encoded.hidden @ decoder.head.T).log_softmax(-1)[:, 7].sum().backward()
    return {name: parameter.grad for name, parameter in decoder.named_parameters()}, int(encoded.replaced)


def own_routes():
    """The decoder's own choices, found by replaying nothing."""
    decoder = random_policy(SHAPE, seed=3)
    token_ids = torch.arange(20) % 50
    cosine, sine = decoder.rotary(torch.cat((torch.arange(12), torch.arange(8))))
    hidden = torch.nn.functional.embedding(token_ids, decoder.embed)
    chosen = []
    for layer in decoder.blocks:
        attended = layer.attend(hidden, cosine, sine, [0, 12, 20])
        normed = torch.nn.functional.rms_norm(attended, (16,), layer.post_norm, SHAPE.rms_eps)
        chosen.append(route(normed @ layer.router.T, top_k=2, norm_topk=True).experts)
        hidden = layer(hidden, cosine, sine, [0, 12, 20], None, 0.5)[0]
    return torch.stack(chosen, dim=1)


def test_replaying_the_routers_own_choice_changes_no_bit():
    plain, _ = mean_gradients(None)
    replayed, replaced = mean_gradients(own_routes())
    assert replaced == 0
    for name, gradient in plain.items():
        assert torch.equal(gradient, replayed[name]), name


def test_replayed_experts_send_gradients_to_the_router_also_when_activations_are_recomputed():
    replay = torch.tensor([0, 5], dtype=torch.int16).expand(20, 2, 2)
    kept, _ = mean_gradients(replay)
    again, _ = mean_gradients(replay, checkpointed=True)
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name]), name
        if name.endswith("router"):
            assert gradient.abs().sum() > 0


def test_mixing_is_the_gated_sum_of_each_tokens_experts():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 16, generator=generator)
    gate_up = torch.randn(6, 16, 16, generator=generator)
    down = torch.randn(6, 16, 8, generator=generator)
    routes = route(torch.randn(9, 6, generator=generator), top_k=2, norm_topk=False)
    expected = torch.stack(
        [
            sum(gate * dense(hidden[row][None], gate_up[e], down[e])[0] for e, gate in zip(experts, gates, strict=True))
            for row, (experts, gates) in enumerate(zip(routes.experts.tolist(), routes.gates, strict=True))
        ]
    )
    torch.testing.assert_close(mix_experts(hidden, routes, gate_up, down), expected, atol=1e-5, rtol=1e-5)
