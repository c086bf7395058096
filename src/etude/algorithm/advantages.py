"""How much better a rollout was than its group."""

import math
from collections.abc import Sequence

from etude.types import WITH_REWARD, Trajectory

_DEVIATION_FLOOR = 1e-6


def is_graded(trajectory: Trajectory) -> bool:
    """Whether the rollout has a reward: infrastructure failures are never a score."""
    return trajectory.outcome in WITH_REWARD and trajectory.reward is not None


def centred(rewards: Sequence[float], *, group_size: int) -> list[float]:
    """Return each reward minus the mean of the group.

    A group that lost members is scaled by n/(n-1), which makes the baseline the mean of the *other* survivors: with
    fewer of them, subtracting one's own reward shrinks the advantage more. Two survivors with rewards 1 and 0 out of
    8 get 1 and -1. Not divided by the deviation: that up-weights groups the policy has nearly solved.

    Raises:
        ValueError: Fewer than two rewards: there is no baseline.
    """
    mean = _mean(rewards)
    count = len(rewards)
    factor = 1.0 if count >= group_size else count / (count - 1)
    return [factor * (reward - mean) for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean, over the group's sample deviation (ddof 1, plus 1e-6).

    Raises:
        ValueError: Fewer than two rewards.
    """
    mean = _mean(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + _DEVIATION_FLOOR) for reward in rewards]


def _mean(rewards: Sequence[float]) -> float:
    if len(rewards) <= 1:
        raise ValueError("a baseline needs at least two graded rollouts of the group")
    return math.fsum(rewards) / len(rewards)
