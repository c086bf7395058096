# pyright: basic
import struct

import msgspec

from etude.rollout.group import PlayedGroup
from etude.runtime.step_metrics import Rate, of_groups, of_samplers
from etude.telemetry.metrics import find
from etude.types import (
    Completion,
    Edge,
    Experts,
    Failure,
    FinishReason,
    Group,
    Node,
    Outcome,
    SamplerStatus,
    Support,
    Trajectory,
    VersionRun,
)


def node(node_id=0, parent=None, *, prompt=3, drawn=2, versions=((5, 2),), experts=True, support=True):
    positions = prompt + drawn - (parent is None)
    completion = Completion(
        token_ids=tuple(range(drawn)),
        sampler_logprobs=bytes(4 * drawn),
        versions=tuple(VersionRun(*run) for run in versions),
        finish_reason=FinishReason.STOP,
        pool="exact",
        support=Support(counts=struct.pack(f"<{drawn}H", *[1] * drawn), token_ids=b"", logprobs=b"")
        if support
        else None,
        experts=Experts(start=0, num_layers=2, top_k=1, expert_ids=bytes(2 * 2 * positions)) if experts else None,
    )
    edge = Edge.ROOT if parent is None else Edge.CONTINUATION
    return Node(node_id=node_id, parent=parent, edge=edge, prompt_ids=tuple(range(prompt)), completion=completion)


def attempt(index, *nodes, outcome=Outcome.SCORED, reward: float | None = 1.0):
    return Trajectory(
        rollout_id=f"g-{index}", group_id="g", task_id="t", index=index, outcome=outcome, reward=reward, nodes=nodes,
        failure=None if reward is not None else Failure(component="sandbox", reason="x"), seconds=2.0,
    )  # fmt: skip


def played(*scored, unscored=(), lost=""):
    group = Group(group_id="g", task_id="t", ticket=0, admitted_version=5, trajectories=scored)
    return PlayedGroup(group=group, unscored=unscored, lost=lost)


def test_rollouts_become_one_row_of_known_metrics():
    chain = (node(0), node(1, 0, versions=((5, 1), (6, 1))))
    row = of_groups(
        [
            played(attempt(0, *chain), attempt(1, node(), reward=0.5, outcome=Outcome.TRUNCATED)),
            played(attempt(0, node(), reward=0.0), unscored=(attempt(1, outcome=Outcome.INFRA_ERROR, reward=None),)),
            played(unscored=(attempt(0, outcome=Outcome.HELD, reward=None),), lost="too_few_survivors"),
        ]
    )
    assert not [name for name in row if find(name) is None]
    assert row["reward/pass_rate"] == 1 / 3
    assert (row["rollout/scored_count"], row["rollout/truncated_count"]) == (2, 1)
    assert (row["rollout/infra_errors_count"], row["rollout/held_count"], row["rollout/groups_lost_count"]) == (1, 1, 1)
    assert row["rollout/calls_mean"] == 4 / 3
    assert row["rollout/tokens_mean"] == 8 / 3
    assert (row["rollout/versions_mean"], row["rollout/versions_max"]) == (4 / 3, 2)
    assert {row[f"capture/{what}_fraction"] for what in ("version", "support", "experts")} == {1.0}


def test_what_did_not_arrive_is_missing_from_the_captured_share():
    row = of_groups([played(attempt(0, node(experts=False), node(support=False, versions=((5, 1),))))])
    assert row["capture/experts_fraction"] == 0.5
    assert row["capture/support_fraction"] == 0.5
    assert row["capture/version_fraction"] == 0.75


def test_experts_that_miss_a_position_count_for_fewer_tokens():
    whole = node(prompt=3, drawn=4, versions=((5, 4),))
    assert whole.completion.experts is not None
    fewer = msgspec.structs.replace(whole.completion.experts, expert_ids=whole.completion.experts.expert_ids[:-4])
    cut = msgspec.structs.replace(whole, completion=msgspec.structs.replace(whole.completion, experts=fewer))
    assert of_groups([played(attempt(0, cut))])["capture/experts_fraction"] == 0.75


def test_without_a_scored_rollout_there_is_no_row():
    assert of_groups([]) == {}


def status(pool, drawn, swap):
    return SamplerStatus(
        sampler_id=f"{pool}-{drawn}", pool=pool, view="fp32", lineage="l", version=1, digest="", running=1, waiting=2,
        tokens_drawn=drawn, swaps=3, swap_seconds_max=swap,
    )  # fmt: skip


def test_samplers_are_summed_by_pool_and_in_all():
    row = of_samplers([status("a", 10, 0.1), status("a", 5, 0.3), status("b", 1, 0.2)])
    assert not [name for name in row if find(name) is None]
    assert row["sampling/tokens_drawn"] == 16
    assert (row["sampling/tokens_drawn/a"], row["sampling/tokens_drawn/b"]) == (15, 1)
    assert (row["sampling/swap_s_max/a"], row["sampling/swaps_count/a"], row["sampling/running_count/b"]) == (0.3, 6, 1)


def test_a_rate_counts_what_grew_since_the_last_look():
    rate = Rate(100.0)
    assert rate.per_second(100.0) == 0.0
    assert rate.per_second(150.0) > 0.0
    assert rate.per_second(10.0) > 0.0, "a sampler that came back counts from zero"
