# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
import json
from pathlib import Path

import pytest
import torch

from etude.algorithm.corrections import capped, clipped, correction_of, masked, trusted
from etude.algorithm.losses import reinforce, score_centred
from etude.learning_config import AlgorithmSection

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "recipe_vectors.json").read_text())
WEIGHTS = {
    "none": lambda logp, logq, advantages: torch.ones_like(logp),
    "tis2": lambda logp, logq, advantages: capped(logp - logq, cap=2.0),
    "mis_05_5": lambda logp, logq, advantages: masked(logp - logq, low=0.5, high=5.0),
    "exact": lambda logp, logq, advantages: (logp - logq).exp(),
}
P = torch.tensor(VECTORS["sc_support"]["p"])
Q = torch.tensor(VECTORS["sc_support"]["q"])


def centred_ascent(drawn, weight, *, p=P, q=Q, advantage=1.0, temperature=1.0):
    """Minus the gradient on the logits of one token."""
    logits = (p.log() * temperature).clone()[None].requires_grad_()
    loss = score_centred(
        logits, torch.tensor([drawn]), q.log()[None], torch.tensor([advantage]), weight, temperature=temperature
    )
    loss.total.backward()
    return -logits.grad[0]


@pytest.mark.parametrize("case", VECTORS["sc_support"]["cases"])
def test_score_centring_gives_the_golden_gradient_on_the_support(case):
    ascent = centred_ascent(case["a"], WEIGHTS[case["mode"]], advantage=case["A"])
    torch.testing.assert_close(ascent, torch.tensor(case["neg_dl_dz"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_centred_scores_have_no_drift_under_the_sampler(name):
    drift = sum(Q[a] * centred_ascent(a, WEIGHTS[name]) for a in range(4))
    torch.testing.assert_close(drift, torch.zeros(4), atol=1e-7, rtol=0)


def test_masking_without_centring_and_skipping_the_correction_both_drift():
    weight = WEIGHTS["mis_05_5"]
    skipped = sum(Q[a] * centred_ascent(a, weight) for a in range(3))  # token 3 is masked
    torch.testing.assert_close(skipped, torch.tensor([0.0024, 0.0012, 0.00032, -0.00392]), atol=1e-7, rtol=0)
    drift = torch.zeros(4)
    for a in range(4):
        logits = P.log().clone()[None].requires_grad_()
        reinforce(logits, torch.tensor([a]), Q[a].log()[None], torch.ones(1), weight).total.backward()
        drift -= Q[a] * logits.grad[0]
    torch.testing.assert_close(drift, torch.tensor([0.012, 0.006, 0.0016, -0.0196]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_closed_form_is_the_gradient_of_the_written_loss(name, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 6, generator=generator).requires_grad_()
    support_logq = torch.log_softmax(torch.randn(5, 6, generator=generator), dim=-1)
    drawn = torch.tensor([0, 5, 2, 3, 1])
    advantages = torch.randn(5, generator=generator)
    found = score_centred(logits, drawn, support_logq, advantages, WEIGHTS[name], temperature=temperature)
    (closed,) = torch.autograd.grad(found.total, logits)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    weights = WEIGHTS[name](logprobs.detach(), support_logq, advantages[:, None])
    rows = torch.arange(5)
    bracket = weights[rows, drawn] * logprobs[rows, drawn] - (support_logq.exp() * weights * logprobs).sum(dim=-1)
    written = -(advantages * bracket).sum()
    torch.testing.assert_close(found.total, written)
    torch.testing.assert_close(closed, torch.autograd.grad(written, logits)[0], atol=1e-6, rtol=1e-5)


def test_padding_of_a_support_changes_nothing_and_gets_no_gradient():
    logits = P.log()[None].clone().requires_grad_()
    wide = torch.cat((P.log(), torch.tensor([-torch.inf, -torch.inf])))[None].clone().requires_grad_()
    wide_q = torch.cat((Q.log(), torch.tensor([-torch.inf, -torch.inf])))[None]
    weight = WEIGHTS["mis_05_5"]
    narrow_loss = score_centred(logits, torch.tensor([1]), Q.log()[None], torch.ones(1), weight)
    wide_loss = score_centred(wide, torch.tensor([1]), wide_q, torch.ones(1), weight)
    (narrow_loss.total + wide_loss.total).backward()
    assert torch.equal(wide.grad[0, :4], logits.grad[0])
    assert torch.equal(wide.grad[0, 4:], torch.zeros(2))
    assert torch.equal(wide_loss.entropy, narrow_loss.entropy)


def test_a_forced_token_has_exactly_no_gradient():
    logits = torch.tensor([[1.5]], requires_grad=True)
    score_centred(logits, torch.tensor([0]), torch.zeros(1, 1), torch.ones(1), WEIGHTS["mis_05_5"]).total.backward()
    assert logits.grad.item() == 0.0


def test_at_equal_policies_every_loss_has_the_plain_policy_gradient():
    logits = P.log().clone()[None].requires_grad_()
    for name in ("mis", "ipo", "cispo", "tis", "grpo"):
        logits.grad = None
        correction = correction_of(AlgorithmSection(loss=name))
        reinforce(logits, torch.tensor([1]), P[1].log()[None], torch.ones(1), correction).total.backward()
        torch.testing.assert_close(-logits.grad[0], torch.tensor([-0.6, 0.7, -0.08, -0.02]), msg=name)
    torch.testing.assert_close(
        centred_ascent(1, correction_of(AlgorithmSection(loss="sc_mis")), q=P), torch.tensor([-0.6, 0.7, -0.08, -0.02])
    )


RATIOS = torch.tensor([0.4, 0.5, 1.0, 5.0, 5.1]).log()


def test_token_weights_match_the_reference_at_and_beyond_their_bounds():
    up, down = torch.ones(5), -torch.ones(5)
    torch.testing.assert_close(masked(RATIOS, low=0.5, high=5.0), torch.tensor([0, 0.5, 1, 5, 0]))
    torch.testing.assert_close(capped(RATIOS, cap=2.0), torch.tensor([0.4, 0.5, 1, 2, 2]))
    torch.testing.assert_close(capped(RATIOS, cap=5.0), torch.tensor([0.4, 0.5, 1, 5, 5]))
    torch.testing.assert_close(clipped(RATIOS, up, low=0.2, high=0.28), torch.tensor([0.4, 0.5, 1, 0, 0]))
    torch.testing.assert_close(clipped(RATIOS, down, low=0.2, high=0.28), torch.tensor([0, 0, 1, 5, 5.1]))
    p, q = torch.tensor([0.9, 0.001, 0.55]), torch.tensor([0.7, 0.0001, 0.5])
    torch.testing.assert_close(trusted(p.log(), q.log(), epsilon=0.1), torch.tensor([0.0, 10.0, 1.1]))


def test_the_band_keeps_the_golden_tokens_in_either_precision():
    golden = VECTORS["mis_ratio"]
    for dtype in (torch.float32, torch.float64):
        p, q = torch.tensor(golden["p"], dtype=dtype), torch.tensor(golden["q"], dtype=dtype)
        assert (masked(p.log() - q.log(), low=0.5, high=5.0) > 0).tolist() == golden["keep"]


@pytest.mark.parametrize("name", ["mis", "ipo", "cispo", "tis", "grpo"])
def test_weights_are_constants_of_the_loss(name):
    correction = correction_of(AlgorithmSection(loss=name))
    logits = torch.tensor([[0.2, 0.1, -0.3]], requires_grad=True)
    logq = torch.log_softmax(torch.tensor([0.25, 0.1, -0.3]), dim=-1)[:1]
    loss = reinforce(logits, torch.tensor([0]), logq, torch.tensor([2.0]), correction)
    loss.total.backward()
    p = torch.softmax(logits.detach()[0], dim=-1)
    expected = 2.0 * loss.weight[0] * (torch.tensor([1.0, 0, 0]) - p)
    torch.testing.assert_close(-logits.grad[0], expected)


def test_normalising_over_the_support_removes_the_bias_and_leaves_the_rest_alone():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
    support = logits[torch.tensor([0, 1])][None]
    loss = reinforce(support, torch.tensor([0]), torch.zeros(1), torch.ones(1), WEIGHTS["none"])
    loss.total.backward()
    assert loss.logp.item() == pytest.approx(-0.313262, abs=1e-6)
    assert torch.log_softmax(logits, dim=0)[0].item() == pytest.approx(-0.440190, abs=1e-6)
    assert torch.equal(logits.grad[2:], torch.zeros(2))
