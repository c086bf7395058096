"""Policy-gradient losses as unnormalised sums: the optimizer step divides by its global token count."""

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from etude.algorithm.corrections import Correction


class TokenLoss(NamedTuple):
    """The loss of some tokens, and what there is to know about each."""

    total: Float[Tensor, ""]
    """Sum over the tokens; the only part with a gradient."""
    logp: Float[Tensor, " tokens"]
    """Trainer's log-probability of the drawn token."""
    weight: Float[Tensor, " tokens"]
    """Weight of the drawn token; 0 where the correction masked it."""
    entropy: Float[Tensor, " tokens"]
    """Of the trainer's distribution, over the support where there is one."""
    pull: Float[Tensor, " tokens"]
    """L1 norm of what centring subtracts from the gradient of the logits; 0 without centring."""


def reinforce(
    logits: Float[Tensor, "tokens width"],
    drawn: Int[Tensor, " tokens"],
    logq: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    correction: Correction,
    *,
    temperature: float = 1.0,
) -> TokenLoss:
    """Return the sum of -A f(r) log p over tokens, f(r) and A being constants.

    Args:
        logits: Of the support, -inf where padded, or of the whole vocabulary.
        drawn: Column of each drawn token.
        logq: Sampler's log-probability of each drawn token, under the same support.
        advantages: Of each token's rollout.
        correction: The weight function f.
        temperature: With which the tokens were drawn.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    logp = logprobs.gather(1, drawn[:, None])[:, 0]
    fixed = logp.detach()
    weight = correction(fixed, logq, advantages)
    total = -(weight * advantages * logp).sum()
    held = logprobs.detach()
    entropy = _entropy(held.exp(), held.masked_fill(held.isneginf(), 0.0))
    return TokenLoss(total, fixed, weight, entropy, torch.zeros_like(fixed))


def score_centred(
    logits: Float[Tensor, "tokens width"],
    drawn: Int[Tensor, " tokens"],
    support_logq: Float[Tensor, "tokens width"],
    advantages: Float[Tensor, " tokens"],
    correction: Correction,
    *,
    temperature: float = 1.0,
) -> TokenLoss:
    """Return the sum of -A [w_a log p_a - sum_v q_v w_v log p_v] over tokens, w = f(p/q) being constants.

    Subtracting the sampler's expectation of the score removes, exactly and per prefix, the drift of the trainer
    towards a biased copy of itself; what is left is the covariance of advantage and score. It applies to every token,
    also to those whose own weight is 0.

    Args:
        logits: Of the support; -inf where padded.
        drawn: Column of each drawn token in its support.
        support_logq: Sampler's log-probabilities on the support; -inf where padded.
        advantages: Of each token's rollout.
        correction: The weight function f.
        temperature: With which the tokens were drawn.
    """
    parts: object = _ScoreCentred.apply(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        logits, drawn, support_logq, advantages, correction, temperature
    )
    return TokenLoss(*cast("tuple[Tensor, Tensor, Tensor, Tensor, Tensor]", parts))


class _ScoreCentred(torch.autograd.Function):
    """The gradient in closed form: with the coefficients q_v w_v written out, large terms cancel in float32."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 torch gives the context no type
        logits: Tensor,
        drawn: Tensor,
        support_logq: Tensor,
        advantages: Tensor,
        correction: Correction,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        inside = ~support_logq.isneginf()
        column = drawn[:, None]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        p = logprobs.exp()
        # Padding takes part in nothing: ratio 1 there, so that no difference of infinities arises.
        logprobs = logprobs.masked_fill(~inside, 0.0)
        weights = correction(logprobs, support_logq.masked_fill(~inside, 0.0), advantages[:, None])
        expected = support_logq.exp() * weights
        weight = weights.gather(1, column)
        subtracted = expected - p * expected.sum(dim=-1, keepdim=True)
        ascent = (-weight * p - subtracted).scatter_add_(1, column, weight)
        ctx.save_for_backward(ascent * (advantages[:, None] / -temperature))
        logp = logprobs.gather(1, column)[:, 0]
        losses = -advantages * (weight[:, 0] * logp - (expected * logprobs).sum(dim=-1))
        extras = (logp, weight[:, 0], _entropy(p, logprobs), subtracted.abs().sum(dim=-1))
        ctx.mark_non_differentiable(*extras)
        return losses.sum(), *extras

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # noqa: ANN401
        (slope,) = cast("tuple[Tensor]", ctx.saved_tensors)
        return slope * grads[0], None, None, None, None, None


def _entropy(p: Tensor, finite_logprobs: Tensor) -> Tensor:
    return -(p * finite_logprobs).sum(dim=-1)
