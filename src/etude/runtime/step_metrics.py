"""What a step's rollouts say, as one row of metrics."""

from collections import Counter
from collections.abc import Iterable, Sequence
from time import perf_counter

from etude.rollout.group import PlayedGroup
from etude.types import Node, Outcome, SamplerStatus, Trajectory

_COUNTED = {
    Outcome.SCORED: "rollout/scored_count",
    Outcome.TRUNCATED: "rollout/truncated_count",
    Outcome.INFRA_ERROR: "rollout/infra_errors_count",
    Outcome.JUDGE_ERROR: "rollout/judge_errors_count",
    Outcome.HELD: "rollout/held_count",
    Outcome.CANCELLED: "rollout/cancelled_count",
}


def of_groups(played: Sequence[PlayedGroup]) -> dict[str, float]:
    """Return metrics of the rollouts of these groups; empty without any."""
    scored = [trajectory for group in played for trajectory in group.group.trajectories]
    tried = [*scored, *(trajectory for group in played for trajectory in group.unscored)]
    if not scored:
        return {}
    outcomes = Counter(trajectory.outcome for trajectory in tried)
    versions = [_num_versions(trajectory) for trajectory in scored]
    rewards = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    counts = {name: float(outcomes[outcome]) for outcome, name in _COUNTED.items()}
    return (
        counts
        | _capture(scored)
        | {
            "reward/pass_rate": _mean(float(reward >= 1.0) for reward in rewards),
            "rollout/groups_lost_count": float(sum(bool(group.lost) for group in played)),
            "rollout/calls_mean": _mean(len(trajectory.nodes) for trajectory in scored),
            "rollout/seconds_mean": _mean(trajectory.seconds for trajectory in scored),
            "rollout/tokens_mean": _mean(_num_drawn(trajectory.nodes) for trajectory in scored),
            "rollout/versions_mean": _mean(versions),
            "rollout/versions_max": float(max(versions)),
        }
    )


def of_samplers(statuses: Sequence[SamplerStatus]) -> dict[str, float]:
    """Return metrics of the samplers, by pool and in all."""
    row = {"sampling/tokens_drawn": float(sum(status.tokens_drawn for status in statuses))}
    for pool in {status.pool for status in statuses}:
        members = [status for status in statuses if status.pool == pool]
        row |= {
            f"sampling/tokens_drawn/{pool}": float(sum(status.tokens_drawn for status in members)),
            f"sampling/running_count/{pool}": float(sum(status.running for status in members)),
            f"sampling/waiting_count/{pool}": float(sum(status.waiting for status in members)),
            f"sampling/swaps_count/{pool}": float(sum(status.swaps for status in members)),
            f"sampling/swap_s_max/{pool}": max(status.swap_seconds_max for status in members),
        }
    return row


class Rate:
    """Growth of a count per second, from one look to the next."""

    def __init__(self, count: float) -> None:
        self._count = count
        self._time = perf_counter()

    def per_second(self, count: float) -> float:
        """Return how fast the count grew since the last look; a count that fell was started anew."""
        now = perf_counter()
        grown = count - self._count if count >= self._count else count
        rate = grown / max(now - self._time, 1e-9)
        self._count, self._time = count, now
        return rate


def _capture(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return which share of the drawn tokens arrived with everything about how they were drawn."""
    nodes = [node for trajectory in trajectories for node in trajectory.nodes]
    drawn = max(1, _num_drawn(nodes))
    return {
        "capture/version_fraction": sum(run.count for node in nodes for run in node.completion.versions) / drawn,
        "capture/support_fraction": sum(map(_num_supported, nodes)) / drawn,
        "capture/experts_fraction": sum(map(_num_routed, nodes)) / drawn,
    }


def _num_supported(node: Node) -> int:
    support = node.completion.support
    if support is None:
        return 0
    return sum(count > 0 for count in memoryview(support.counts).cast("H"))


def _num_routed(node: Node) -> int:
    """Return how many tokens arrived with the experts of every position that they were drawn from."""
    experts = node.completion.experts
    if experts is None:
        return 0
    # The last drawn token was no input yet; a parent's last one is an input of this call.
    expected = len(node.prompt_ids) + len(node.completion.token_ids) - (node.parent is None)
    return max(0, len(node.completion.token_ids) - (expected - experts.num_positions))


def _num_drawn(nodes: Iterable[Node]) -> int:
    return sum(len(node.completion.token_ids) for node in nodes)


def _num_versions(trajectory: Trajectory) -> int:
    return len({run.version for node in trajectory.nodes for run in node.completion.versions})


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
