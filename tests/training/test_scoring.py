# pyright: basic, reportOptionalMemberAccess=false
"""The trainer says what it thinks of tokens on the path that it trains on."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from etude.errors import RunError
from etude.policy.digest import held_digest, view_digest
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.store.opening import open_store
from etude.training.scoring import score
from etude.types import Experts, SamplingParams, ScoreRequest, Support
from etude.weights.publisher import open_publisher

SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, qk_norm=True,
    ffn_hidden=0, experts=4, experts_per_token=2, expert_hidden=16, norm_topk=True, max_context=64,
)  # fmt: skip
TOKENS = tuple(int(token) for token in np.random.default_rng(0).integers(0, 64, 20))
PARAMS = SamplingParams(temperature=0.7)


def routes(*, seed: int) -> Experts:
    rng = np.random.default_rng(seed)
    ids = np.stack([np.sort(rng.permutation(4)[:2]) for _ in range(19 * 2)]).astype("<u2")
    return Experts(start=0, num_layers=2, top_k=2, expert_ids=ids.tobytes())


def floats(data: bytes):
    return np.frombuffer(data, "<f4")


def plain(made, experts: Experts | None = None):
    replay = None
    if experts is not None:
        ids = np.frombuffer(experts.expert_ids, "<u2").reshape(19, 2, 2).astype(np.int64)
        replay = torch.from_numpy(ids)
    tokens = torch.tensor(TOKENS[:-1])
    with torch.no_grad():
        hidden = made(tokens, torch.arange(19), [0, 19], replay=replay, plausibility=0.0).hidden
        return (hidden @ made.head.T).float()[11:]


def test_log_probabilities_are_those_of_a_plain_forward_at_the_temperature():
    made = random_policy(SHAPE, seed=0)
    scored = score(
        made, ScoreRequest(token_ids=TOKENS, drawn_from=12, params=PARAMS, raw_positions=(12, 19)), version=3
    )
    logits = plain(made)
    drawn = torch.tensor(TOKENS[12:])
    wanted = (logits / 0.7).log_softmax(-1).gather(1, drawn[:, None])[:, 0]
    np.testing.assert_allclose(floats(scored.logprobs), wanted, atol=1e-6)
    raw = floats(scored.raw).reshape(2, 64)
    np.testing.assert_allclose(raw, logits[[0, 7]].log_softmax(-1), atol=1e-6)
    assert (scored.version, scored.support) == (3, None)


def test_a_support_is_normalised_over_and_a_token_outside_has_no_probability():
    made = random_policy(SHAPE, seed=0)
    rows = [sorted({token, 1, 5}) for token in TOKENS[12:]]
    rows[3] = [row for row in (2, 3, 4) if row != TOKENS[15]]
    ids = np.concatenate(rows).astype("<u4")
    support = Support(
        counts=np.array([len(row) for row in rows], "<u2").tobytes(),
        token_ids=ids.tobytes(),
        logprobs=np.zeros(len(ids), "<f4").tobytes(),
    )
    scored = score(made, ScoreRequest(token_ids=TOKENS, drawn_from=12, params=PARAMS, support=support), version=0)
    wanted = [(logits[row] / 0.7).log_softmax(-1) for logits, row in zip(plain(made), rows, strict=True)]
    np.testing.assert_allclose(floats(scored.support.logprobs), torch.cat(wanted), atol=1e-6)
    drawn = floats(scored.logprobs)
    assert drawn[3] == -np.inf
    assert drawn[0] == pytest.approx(float(wanted[0][rows[0].index(TOKENS[12])]), abs=1e-6)


def test_replayed_experts_are_the_ones_used_and_the_routers_own_are_told_too():
    made = random_policy(SHAPE, seed=0)
    request = ScoreRequest(token_ids=TOKENS, drawn_from=12, params=PARAMS)
    own = score(made, request, version=0)
    assert own.experts == own.experts_own
    told = routes(seed=1)
    replayed = score(made, replace(request, experts=told), version=0)
    assert replayed.experts == told
    assert replayed.experts_own == own.experts
    wanted = (plain(made, told) / 0.7).log_softmax(-1).gather(1, torch.tensor(TOKENS[12:])[:, None])[:, 0]
    np.testing.assert_allclose(floats(replayed.logprobs), wanted, atol=1e-6)
    assert not np.allclose(floats(own.logprobs), floats(replayed.logprobs), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drawn_from": 0}, "drawn_from"),
        ({"drawn_from": 20}, "drawn_from"),
        ({"token_ids": (1, 64)}, "ids below 64"),
        ({"raw_positions": (3,)}, "raw_positions"),
        ({"support": Support(counts=b"\1\0", token_ids=b"\0\0\0\0", logprobs=b"\0\0\0\0")}, "support"),
        ({"experts": Experts(start=0, num_layers=2, top_k=2, expert_ids=b"\0\0" * 8)}, "experts"),
        ({"experts": Experts(start=0, num_layers=2, top_k=2, expert_ids=b"\7\0" * 76)}, "experts"),
    ],
)
def test_a_request_that_does_not_hold_together_is_refused(changes, reason):
    made = random_policy(SHAPE, seed=0)
    request = ScoreRequest(token_ids=TOKENS, drawn_from=12, params=PARAMS)
    with pytest.raises(RunError, match=reason):
        score(made, replace(request, **changes), version=0)


async def test_the_digest_of_weights_in_hand_is_that_of_their_manifest():
    made = random_policy(SHAPE, seed=0)
    publisher = await open_publisher(open_store("memory://"), lineage="one")
    manifest = await publisher.publish(version=0, step=0, tensors=made.hf_tensors())
    assert held_digest(made.hf_tensors()) == view_digest(made.hf_tensors(), "fp32") == manifest.digest
    assert len({view_digest(made.hf_tensors(), view) for view in ("fp32", "bf16", "fp8")}) == 3
