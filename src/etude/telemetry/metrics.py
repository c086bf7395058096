"""The one list of metrics: what each name means, its unit, and how values of several parts become one.

`docs/metrics.md` is generated from it (`python -m etude.telemetry.metrics > docs/metrics.md`). Names are
`room/noun_unit`; `<pool>` and the like stand for one more part that varies.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec


class Reduction(StrEnum):
    """How values of several micro-batches, ranks or rollouts become one."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"


class Metric(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    unit: str
    reduction: Reduction
    meaning: str


_SUM, _MEAN, _MAX, _LAST = Reduction.SUM, Reduction.MEAN, Reduction.MAX, Reduction.LAST

METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", _MEAN, "Reward over scored and truncated rollouts."),
    Metric(
        "reward/pass_rate", "fraction", _MEAN, "Scored and truncated rollouts whose reward is the highest possible."
    ),
    Metric(
        "reward/equal_groups_fraction", "fraction", _MEAN, "Groups whose rewards are all equal: they teach nothing."
    ),
    Metric("reward/<component>", "reward", _MEAN, "A part of the reward that the grader reported by name."),
    Metric("rollout/scored_count", "rollouts", _SUM, "Rollouts that ended by themselves and were graded."),
    Metric("rollout/truncated_count", "rollouts", _SUM, "Rollouts that a budget ended and that were graded."),
    Metric("rollout/infra_errors_count", "rollouts", _SUM, "Rollouts lost to infrastructure; never a score."),
    Metric("rollout/judge_errors_count", "rollouts", _SUM, "Rollouts whose grader gave no valid reward."),
    Metric("rollout/held_count", "rollouts", _SUM, "Rollouts that a screen holds out of baseline and loss."),
    Metric("rollout/cancelled_count", "rollouts", _SUM, "Rollouts that were played while the run was drained."),
    Metric("rollout/groups_lost_count", "groups", _SUM, "Groups with too few survivors, reported lost."),
    Metric("rollout/groups_in_flight_count", "groups", _LAST, "Groups being played."),
    Metric("rollout/groups_queued_count", "groups", _LAST, "Finished groups that wait for the trainer."),
    Metric("rollout/calls_mean", "calls", _MEAN, "Model calls per rollout."),
    Metric("rollout/seconds_mean", "s", _MEAN, "Time from sandbox to reward, per rollout."),
    Metric("rollout/tokens_mean", "tokens", _MEAN, "Tokens drawn per rollout."),
    Metric("rollout/versions_mean", "versions", _MEAN, "Policy versions that drew a rollout's tokens."),
    Metric("rollout/versions_max", "versions", _MAX, "The same, of the rollout with the most."),
    Metric("rollout/tool_errors_fraction", "fraction", _MEAN, "Tool calls that could not be parsed."),
    Metric("rollout/no_submission_fraction", "fraction", _MEAN, "Rollouts that ended without submitting."),
    Metric("staleness/mean_versions", "versions", _MEAN, "Version trained into minus version drawn with, per token."),
    Metric("staleness/max_versions", "versions", _MAX, "The same, of the oldest token; never above `max_staleness`."),
    Metric("capture/version_fraction", "fraction", _MEAN, "Drawn tokens that arrived with their policy version."),
    Metric("capture/support_fraction", "fraction", _MEAN, "Drawn tokens that arrived with their sampling support."),
    Metric("capture/experts_fraction", "fraction", _MEAN, "Drawn tokens that arrived with their routed experts."),
    Metric("gateway/calls", "calls", _SUM, "Model calls answered."),
    Metric("gateway/calls_abandoned", "calls", _SUM, "Model calls whose harness did not wait for the answer."),
    Metric("gateway/replays", "calls", _SUM, "Repeated calls answered with what was drawn before."),
    Metric("gateway/tokens_drawn", "tokens", _SUM, "Tokens drawn through the gateway."),
    Metric("gateway/tool_parse_errors", "calls", _SUM, "Answers whose tool call could not be parsed."),
    Metric("gateway/model_s", "s", _SUM, "Time that calls waited for the sampler."),
    Metric("gateway/edges_<edge>", "calls", _SUM, "Calls by how they hang in the tree of their session."),
    Metric(
        "gateway/prefix_break_rate",
        "fraction",
        _MEAN,
        "Calls of a session that had to be read anew, for no reason that its harness declared.",
    ),
    Metric("sampling/tokens_drawn", "tokens", _SUM, "Tokens drawn by all samplers."),
    Metric("sampling/tokens_per_s", "tokens/s", _SUM, "The same, per second of wall time."),
    Metric("sampling/tokens_drawn/<pool>", "tokens", _SUM, "Tokens drawn by one pool."),
    Metric("sampling/running_count/<pool>", "requests", _LAST, "Requests being decoded."),
    Metric("sampling/waiting_count/<pool>", "requests", _LAST, "Requests that wait for a place in the batch."),
    Metric("sampling/swap_s_max/<pool>", "s", _MAX, "Longest pause of decoding while weights were swapped."),
    Metric("sampling/swaps_count/<pool>", "swaps", _SUM, "Versions swapped in."),
    Metric(
        "sampling/cached_tokens_fraction", "fraction", _MEAN, "Prompt tokens whose keys and values were still there."
    ),
    Metric("mismatch/k1_nats", "nats", _MEAN, "As `mismatch/k1/<pool>`, over all pools."),
    Metric("mismatch/k3_nats", "nats", _MEAN, "As `mismatch/k3/<pool>`, over all pools."),
    Metric("mismatch/abs_mean_nats", "nats", _MEAN, "Mean of |log p - log q|."),
    Metric("mismatch/abs_p99_nats", "nats", _MAX, "99th percentile of |log p - log q|."),
    Metric("mismatch/abs_max_nats", "nats", _MAX, "Largest |log p - log q|."),
    Metric("mismatch/k1/<pool>", "nats", _MEAN, "KL(sampler, trainer) per token, unbiased: mean of log q - log p."),
    Metric("mismatch/k3/<pool>", "nats", _MEAN, "The same, never negative: mean of p/q - 1 - log(p/q)."),
    Metric("mismatch/abs_p99/<pool>", "nats", _MAX, "99th percentile of |log p - log q|."),
    Metric("mismatch/tokens_count/<pool>", "tokens", _SUM, "Tokens that the mismatch was measured on."),
    Metric("probe/gap_nats/<pool>", "nats", _MAX, "Mean |sampler - trainer| on the fixed text, at the newest version."),
    Metric("probe/gap_slope/<pool>", "nats/version", _MAX, "How fast that grows; an alarm when it is more than noise."),
    Metric("ratio/min", "ratio", _LAST, "Smallest importance ratio p/q."),
    Metric("ratio/max", "ratio", _MAX, "Largest importance ratio p/q."),
    Metric("ratio/p01", "ratio", _LAST, "1st percentile of the importance ratio."),
    Metric("ratio/p99", "ratio", _MAX, "99th percentile of the importance ratio."),
    Metric("ratio/ess_fraction", "fraction", _MEAN, "Effective sample size over tokens: 1 when all ratios are equal."),
    Metric("ratio/chi2", "", _MEAN, "Mean of the squared ratio, minus 1."),
    Metric("ratio/masked_low_fraction", "fraction", _MEAN, "Trainable tokens masked for a ratio below `mis_low`."),
    Metric("ratio/masked_high_fraction", "fraction", _MEAN, "Trainable tokens masked for a ratio above `mis_high`."),
    Metric("sc/sampler_head_mass", "fraction", _MEAN, "Sampler probability of the ids that score centering sums over."),
    Metric("sc/trainer_head_mass", "fraction", _MEAN, "Trainer probability of the same ids."),
    Metric("sc/tail_ratio_mean", "ratio", _MEAN, "Trainer over sampler mass outside those ids; above 5 is an alarm."),
    Metric("sc/tail_ratio_max", "ratio", _MAX, "The same, largest."),
    Metric("sc/pull_l1", "", _MEAN, "Size of the gradient on the logits per token, without the advantage."),
    Metric("support/size_mean", "ids", _MEAN, "Ids that could have been drawn, per token."),
    Metric("support/size_p99", "ids", _MAX, "The same, 99th percentile."),
    Metric("support/size_max", "ids", _MAX, "The same, largest."),
    Metric("support/singleton_fraction", "fraction", _MEAN, "Tokens that had no alternative."),
    Metric("router/replaced_fraction", "fraction", _MEAN, "Replayed experts that the plausibility filter replaced."),
    Metric(
        "router/overlap_fraction",
        "fraction",
        _MEAN,
        "Replayed experts that the trainer's router would have chosen too.",
    ),
    Metric("trainer/loss", "nats", _SUM, "Loss of the step, over its global token count."),
    Metric("trainer/grad_norm", "", _LAST, "Norm of the gradient before clipping."),
    Metric("trainer/update_norm", "", _LAST, "Norm of the step that the optimizer took."),
    Metric("trainer/lr", "", _LAST, "Learning rate."),
    Metric("policy/entropy_nats", "nats", _MEAN, "Entropy of the trainer's distribution over the support, per token."),
    Metric("policy/top1_mean", "fraction", _MEAN, "Probability of the most likely token."),
    Metric("policy/kl_nats", "nats", _MEAN, "KL to the reference policy per token, where it is on."),
    Metric("tokens/trained", "tokens", _SUM, "Drawn tokens with a gradient."),
    Metric(
        "tokens/drawn", "tokens", _SUM, "Tokens drawn for the groups of the step: trained, masked and dropped ones."
    ),
    Metric("tokens/masked_<reason>", "tokens", _SUM, "Drawn tokens in a sample but without a gradient, by reason."),
    Metric("tokens/dropped_<reason>", "tokens", _SUM, "Drawn tokens in no sample, by reason."),
    Metric("trainer/tokens_per_s", "tokens/s", _SUM, "Tokens of all rows, prompts included, per second of training."),
    Metric("trainer/samples_count", "samples", _SUM, "Samples of the step."),
    Metric("trainer/groups_count", "groups", _SUM, "Groups of the step."),
    Metric("trainer/fill_fraction", "fraction", _MEAN, "Filled part of the packed rows."),
    Metric("trainer/wait_s", "s", _SUM, "Time that the trainer waited for groups."),
    Metric("trainer/step_s", "s", _SUM, "Time of the optimizer step, waiting excluded."),
    Metric("weights/publish_wait_s", "s", _SUM, "Time that the trainer waited for the publishing of the last version."),
    Metric("weights/copy_s", "s", _SUM, "Time that it took to copy the weights that are published."),
    Metric("weights/publish_s", "s", _LAST, "Time that publishing the last version took, beside the training."),
    Metric("weights/bytes", "bytes", _SUM, "Size of the objects of the last version."),
    Metric("weights/lag_versions", "versions", _MAX, "Newest version minus the oldest that a sampler serves."),
    Metric(
        "runtime/loop_lag_s", "s", _MAX, "Longest time that the controller's event loop was late since the last step."
    ),
    Metric("eval/pass_rate", "fraction", _LAST, "Pass rate on the held-out tasks: mean over attempts, then tasks."),
    Metric("eval/reward_mean", "reward", _LAST, "Mean reward on the held-out tasks."),
)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"[A-Za-z0-9_.-]+", name))


_PATTERNS = tuple((_pattern(metric.name), metric) for metric in METRICS)


def find(name: str) -> Metric | None:
    """Return what a name means, or None when it is in no table."""
    exact = (metric for metric in METRICS if metric.name == name)
    return next(exact, None) or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return one value per name from those of several parts of equal weight, each by its metric's reduction.

    Raise `ValueError` for a name in no table: there is no telling how its values add up.
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: _reduce(name, found) for name, found in values.items()}


def _reduce(name: str, values: list[float]) -> float:
    metric = find(name)
    if metric is None:
        msg = f"metric {name!r} is unknown; add it to etude.telemetry.metrics"
        raise ValueError(msg)
    match metric.reduction:
        case Reduction.SUM:
            return sum(values)
        case Reduction.MEAN:
            return sum(values) / len(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.LAST:
            return values[-1]


def markdown() -> str:
    """Return the page `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every row of `metrics/` carries `step`, `version` (the policy version that the step made) and `time` (seconds",
        "since 1970, UTC). Generated from `etude/telemetry/metrics.py` by `python -m etude.telemetry.metrics`.",
        "",
        "| name | unit | over parts | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{m.name}` | {m.unit} | {m.reduction} | {m.meaning} |" for m in METRICS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
