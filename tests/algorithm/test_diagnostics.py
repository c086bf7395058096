# pyright: basic
import math

import pytest
import torch

from etude.algorithm.diagnostics import TokenRecord, diagnose, joined
from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.algorithm.staleness import group_staleness, oldest_version, token_versions
from etude.types import VersionRun


def record(log_ratio, weight=None, versions=None, pools=None):
    count = len(log_ratio)
    return TokenRecord(
        log_ratio=torch.tensor(log_ratio),
        weight=torch.tensor(log_ratio).exp() if weight is None else torch.tensor(weight),
        entropy=torch.ones(count),
        pull=torch.zeros(count),
        support_size=torch.ones(count, dtype=torch.int64),
        versions=torch.tensor(versions or [0] * count),
        pools=torch.tensor(pools or [0] * count),
    )


def test_kl_estimates_are_those_of_the_sampler_to_the_trainer():
    metrics = diagnose(record([math.log(2.0), 0.0]), version=0, pool_names=["a"])
    assert metrics["mismatch/k1_nats"] == pytest.approx(-math.log(2) / 2)
    assert metrics["mismatch/k3_nats"] == pytest.approx((1 - math.log(2)) / 2)


def test_effective_sample_size_is_the_golden_one():
    even = diagnose(record([0.0] * 4), version=0, pool_names=["a"])
    assert even["ratio/ess_fraction"] == pytest.approx(1.0)
    uneven = diagnose(record([0.0] * 4, weight=[10.0, 0.1, 0.1, 0.1]), version=0, pool_names=["a"])
    assert uneven["ratio/ess_fraction"] == pytest.approx(0.26515, abs=1e-5)


def test_masked_tokens_are_counted_by_side_over_all_tokens():
    metrics = diagnose(record([-2.0, 0.0, 3.0, 3.0], weight=[0.0, 1.0, 0.0, 0.0]), version=0, pool_names=["a"])
    assert (metrics["ratio/masked_low_fraction"], metrics["ratio/masked_high_fraction"]) == (0.25, 0.5)


def test_a_bad_pool_is_seen_in_its_own_row():
    metrics = diagnose(record([0.0, 0.0, 1.0], pools=[0, 0, 1]), version=0, pool_names=["good", "bad", "idle"])
    assert metrics["mismatch/k3/good"] == 0.0
    assert metrics["mismatch/k3/bad"] == pytest.approx(math.e - 2)
    assert not [name for name in metrics if name.endswith("/idle")]


def test_parts_and_the_whole_have_the_same_metrics():
    whole = record([0.1, -0.3, 0.2], versions=[1, 2, 3])
    parts = joined([record([0.1], versions=[1]), record([-0.3, 0.2], versions=[2, 3])])
    assert diagnose(parts, version=4, pool_names=["a"]) == diagnose(whole, version=4, pool_names=["a"])


def test_staleness_is_counted_per_token_and_from_the_oldest_for_a_group():
    metrics = diagnose(record([0.0, 0.0], versions=[1, 4]), version=5, pool_names=["a"])
    assert (metrics["staleness/mean_versions"], metrics["staleness/max_versions"]) == (2.5, 4.0)
    assert token_versions((VersionRun(3, 2), VersionRun(5, 1))).tolist() == [3, 3, 5]
    group = synthetic_group(GroupPlan(newest_version=6), 0)
    oldest = oldest_version(group.trajectories)
    assert oldest is not None
    assert group_staleness(group, 9) == 9 - oldest >= 3
    assert oldest_version(()) is None
