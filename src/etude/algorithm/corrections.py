"""Token weights f(r) against the difference between the sampler's policy and the trainer's.

r = p/q is the trainer's probability over the sampler's, of the same token under the same conditions. A weight is a
constant of the loss: no gradient flows through it.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from etude.learning_config import AlgorithmSection

BAND_SLACK = 1e-6
"""On the log-ratio, so that a ratio equal to a bound is inside whichever way it was rounded."""


Correction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Weight of each token from `logp`, `logq` (one shape) and `advantages` (broadcast to it)."""


def masked(log_ratio: Float[Tensor, "*shape"], *, low: float, high: float) -> Float[Tensor, "*shape"]:
    """Return r where low <= r <= high, else 0 (masked importance sampling)."""
    inside = (log_ratio >= math.log(low) - BAND_SLACK) & (log_ratio <= math.log(high) + BAND_SLACK)
    return torch.where(inside, log_ratio.exp(), 0.0)


def capped(log_ratio: Float[Tensor, "*shape"], *, cap: float) -> Float[Tensor, "*shape"]:
    """Return min(r, cap) (truncated importance sampling; CISPO with its upper bound)."""
    return log_ratio.clamp(max=math.log(cap)).exp()


def trusted(logp: Float[Tensor, "*shape"], logq: Float[Tensor, "*shape"], *, epsilon: float) -> Float[Tensor, "*shape"]:
    """Return r where |p - q| <= epsilon, else 0 (IPO: trust by difference, kind to improbable tokens)."""
    inside = (logp.exp() - logq.exp()).abs() <= epsilon + BAND_SLACK
    return torch.where(inside, (logp - logq).exp(), 0.0)


def clipped(
    log_ratio: Float[Tensor, "*shape"], advantages: Float[Tensor, "*#shape"], *, low: float, high: float
) -> Float[Tensor, "*shape"]:
    """Return the slope of PPO's clipped objective: r until the step went 1+high up or 1-low down, then 0."""
    too_far_up = (advantages > 0) & (log_ratio > math.log1p(high) + BAND_SLACK)
    too_far_down = (advantages < 0) & (log_ratio < math.log1p(-low) - BAND_SLACK)
    return torch.where(too_far_up | too_far_down, 0.0, log_ratio.exp())


def correction_of(algorithm: AlgorithmSection) -> Correction:
    """Return the weight function that a configuration names."""

    def weight(logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        match algorithm.loss:
            case "sc_mis" | "mis":
                return masked(logp - logq, low=algorithm.mis_low, high=algorithm.mis_high)
            case "tis":
                return capped(logp - logq, cap=algorithm.ratio_cap)
            case "cispo":
                return capped(logp - logq, cap=algorithm.mis_high)
            case "ipo":
                return trusted(logp, logq, epsilon=algorithm.ipo_epsilon)
            case "grpo":
                return clipped(logp - logq, advantages, low=algorithm.clip_low, high=algorithm.clip_high)

    return weight
