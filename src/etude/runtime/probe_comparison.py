"""What differs between a sampler and the trainer on the same tokens, and what that says about the cause."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.config import PoolSection
from etude.runtime.probe_text import ProbeText
from etude.types import Experts, Scored, ScoreRequest

Floats = NDArray[np.float64]

_LIKELY = np.log(1e-4)
"""What neither side thinks likelier says little in low precision, and is hardly ever drawn."""
_WORST = 10.0
"""How much more than the mean error a single token's may be."""
_MASS_ERROR = 1e-3

_TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "int8": 0.2, "fp8": 0.4, "fp8_block": 0.4, "int4": 1.0}
"""Mean error in nats: three to five times what policies of the quickstart showed (fp8 0.13, bf16 0.03) or SmolLM2-135M
(int8 0.07), and for fp32, where 2e-6 was seen, room for deeper ones; int4 was not measured. A shift by one position
makes several nats, a wrong temperature about one."""


class Tolerance(NamedTuple):
    """Largest error of a pool's samplers, in nats."""

    mean: float

    @property
    def worst(self) -> float:
        """Of a single token."""
        return _WORST * self.mean


class Finding(NamedTuple):
    """What a comparison found."""

    max_error: float
    mean_error: float
    experts_equal: float
    """Share of the sampler's routing choices that the trainer's router would have made; 1 without experts."""
    defect: str
    """What is wrong, empty when the sampler may serve."""


def tolerance_of(pool: PoolSection) -> Tolerance:
    """Return what the pool's samplers may differ by."""
    return Tolerance(pool.probe_tolerance or _TOLERANCES[pool.view])


def floats(data: bytes) -> Floats:
    """Return packed f32 numbers as doubles."""
    return np.frombuffer(data, "<f4").astype(np.float64)


def compare(text: ProbeText, request: ScoreRequest, sampler: Scored, trainer: Scored, tolerance: Tolerance) -> Finding:
    """Compare a sampler with a trainer of equal weights, to which its experts and its support were replayed."""
    shares = _experts_equal(sampler.experts, trainer.experts_own)
    mine, theirs = floats(sampler.logprobs), floats(trainer.logprobs)
    drawn = len(request.token_ids) - request.drawn_from
    if len(mine) != drawn or len(theirs) != drawn:
        return Finding(np.inf, np.inf, shares, f"answered {len(mine)} log-probabilities for {drawn} tokens")
    errors = _errors(mine, theirs)
    defect = _replay_defect(request, sampler, trainer)
    if not defect and _too_far(errors, tolerance):
        cause = _cause(request, mine, theirs, trainer, tolerance)
        defect = f"{cause}: {_first(text, request, mine, theirs, errors, tolerance)}"
    defect = defect or _support_defect(request, sampler, trainer, tolerance) or _raw_defect(sampler, trainer, tolerance)
    return Finding(float(errors.max()), float(errors.mean()), shares, defect)


def _errors(mine: Floats, theirs: Floats) -> Floats:
    """Return |difference| per token; infinite where a token is possible for one side only, or no number."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(mine - theirs)
    errors[(mine == theirs) | (np.maximum(mine, theirs) < _LIKELY)] = 0.0
    return np.where(np.isnan(errors), np.inf, errors)


def _too_far(errors: Floats, tolerance: Tolerance) -> bool:
    return bool(errors.mean() > tolerance.mean or errors.max() > tolerance.worst)


def _cause(request: ScoreRequest, mine: Floats, theirs: Floats, trainer: Scored, tolerance: Tolerance) -> str:
    """Name the mistake that would explain the difference."""
    if len(mine) > 2 and not _too_far(_errors(mine[1:], theirs[:-1]), tolerance):  # noqa: PLR2004
        return "its log-probabilities are shifted: each is that of the token before"
    if len(mine) > 2 and not _too_far(_errors(mine[:-1], theirs[1:]), tolerance):  # noqa: PLR2004
        return "its log-probabilities are shifted: each is that of the token after"
    places = np.array(request.raw_positions, np.int64) - request.drawn_from
    if len(places):
        ids = np.array(request.token_ids)[np.array(request.raw_positions)]
        untempered = floats(trainer.raw).reshape(len(places), -1)[np.arange(len(places)), ids]
        if not _too_far(_errors(mine[places], untempered), tolerance):
            return f"it does not apply the temperature ({request.params.temperature:g})"
    return "its weights, or what it computes with them, are not the trainer's"


def _first(
    text: ProbeText, request: ScoreRequest, mine: Floats, theirs: Floats, errors: Floats, tolerance: Tolerance
) -> str:
    """Describe the first token that differs."""
    beyond = np.flatnonzero(errors > tolerance.worst)
    place = int(beyond[0]) if len(beyond) else int(errors.argmax())
    position = request.drawn_from + place
    token = request.token_ids[position]
    return (
        f"position {position}, id {token} ({text.text_of(token)!r}): sampler {mine[place]:.5f}, "
        f"trainer {theirs[place]:.5f}; mean error {errors.mean():.2g} nats, tolerated {tolerance.mean:g}"
    )


def _replay_defect(request: ScoreRequest, sampler: Scored, trainer: Scored) -> str:
    """Say when the trainer did not use the experts that it was given."""
    if request.experts is None or sampler.experts is None:
        return ""
    used = _experts_equal(sampler.experts, trainer.experts)
    if used == 1.0:
        return ""
    return (
        f"the trainer used only {used:.1%} of the experts that it was to replay: algorithm.replay_experts does nothing"
    )


def _experts_equal(one: Experts | None, other: Experts | None) -> float:
    if one is None or other is None:
        return 1.0
    mine, theirs = np.frombuffer(one.expert_ids, "<u2"), np.frombuffer(other.expert_ids, "<u2")
    return float((mine == theirs).mean()) if len(mine) == len(theirs) else 0.0


def _support_defect(request: ScoreRequest, sampler: Scored, trainer: Scored, tolerance: Tolerance) -> str:
    told = sampler.support
    if trainer.support is None or told is None:
        return ""
    counts = np.frombuffer(told.counts, "<u2").astype(np.int64)
    mine, theirs = floats(told.logprobs), floats(trainer.support.logprobs)
    if len(mine) != counts.sum() or len(theirs) != len(mine) or not counts.all():
        return f"its supports hold {len(mine)} ids, the trainer's {len(theirs)}"
    if 0 < request.params.top_k < counts.max():
        return f"a support has {counts.max()} ids, more than top_k = {request.params.top_k}"
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    masses = np.add.reduceat(np.exp(mine), starts)
    place = int(np.abs(masses - 1).argmax())
    if abs(masses[place] - 1) > _MASS_ERROR:
        return f"position {request.drawn_from + place}: the support's mass is {masses[place]:.4f} and not 1"
    weighted = np.add.reduceat(np.exp(mine) * _errors(mine, theirs), starts)
    if not _too_far(weighted, tolerance):
        return ""
    place = int(weighted.argmax())
    return (
        f"position {request.drawn_from + place}: over the support it differs from the trainer by {weighted[place]:.3g}"
    )


def _raw_defect(sampler: Scored, trainer: Scored, tolerance: Tolerance) -> str:
    """Say when distributions differ away from the tokens looked at."""
    mine, theirs = floats(sampler.raw), floats(trainer.raw)
    if len(mine) != len(theirs):
        return f"it answered {len(mine)} numbers of the whole vocabulary, the trainer {len(theirs)}"
    if not len(mine):
        return ""
    expected = float((np.exp(mine) * _errors(mine, theirs)).sum() / max(1.0, np.exp(mine).sum()))
    if expected <= tolerance.mean:
        return ""
    return f"over the whole vocabulary it differs from the trainer by {expected:.3g} nats"
