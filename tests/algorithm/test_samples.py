# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from etude.algorithm.branches import branches_of
from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.algorithm.ingest import IngestRules, defect
from etude.algorithm.samples import SampleRules, samples_of
from etude.learning_config import AlgorithmSection
from etude.types import Completion, Edge, FinishReason, Group, Node, Outcome, Support, Trajectory, VersionRun

PLAN = GroupPlan(expert_layers=2, newest_version=3)
INGEST = IngestRules(vocab_size=64, newest_version=3, expert_layers=2, experts_per_token=2, num_experts=4)


def rules(**changes):
    defaults = {
        "algorithm": AlgorithmSection(),
        "ingest": IngestRules(vocab_size=64, newest_version=3),
        "group_size": 4,
        "temperature": 1.0,
        "needs_support": False,
    }
    return SampleRules(**(defaults | changes))


def node(node_id, parent, prompt, answer, edge=Edge.CONTINUATION, started=None, link=None):
    completion = Completion(
        token_ids=tuple(answer),
        sampler_logprobs=np.full(len(answer), -1.0, "<f4").tobytes(),
        versions=(VersionRun(1, len(answer)),),
        finish_reason=FinishReason.STOP,
        pool="local",
    )
    started = float(node_id) if started is None else started
    return Node(
        node_id=node_id,
        parent=parent,
        edge=edge,
        link=link,
        prompt_ids=tuple(prompt),
        completion=completion,
        started_s=started,
    )


def rollout(index, nodes, outcome=Outcome.SCORED, reward=None):
    reward = float(index) if reward is None and outcome is Outcome.SCORED else reward
    return Trajectory(
        rollout_id=f"r{index}", group_id="g", task_id="t", index=index, outcome=outcome, reward=reward, nodes=nodes
    )


def group(*trajectories):
    return Group(group_id="g", task_id="t", ticket=0, admitted_version=0, trajectories=trajectories)


PLAIN = rollout(9, (node(0, None, [1], [2], Edge.ROOT),))


def trained_tokens(found):
    return [sample.token_ids[sample.trained].tolist() for sample in found.samples]


def test_a_branch_is_what_the_sampler_saw_and_only_drawn_tokens_are_trained():
    nodes = (node(0, None, [1, 2], [3, 4], Edge.ROOT), node(1, 0, [5], [6]))
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert found.samples[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trained_tokens(found) == [[3, 4, 6], [2]]
    assert [sample.advantage for sample in found.samples] == [-4.5, 4.5]


def test_shared_tokens_are_trained_in_the_first_played_branch_only():
    nodes = (
        node(0, None, [1], [2, 3], Edge.ROOT),
        node(1, 0, [4], [5], started=9.0),
        node(2, 0, [6], [7], started=3.0),
    )
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert [sample.token_ids.tolist() for sample in found.samples[:2]] == [[1, 2, 3, 6, 7], [1, 2, 3, 4, 5]]
    assert trained_tokens(found)[:2] == [[2, 3, 7], [5]]


def test_answers_that_were_asked_for_again_and_led_nowhere_are_dropped():
    nodes = (
        node(0, None, [1], [2], Edge.ROOT),
        node(1, 0, [3], [10]),
        node(2, 0, [3], [11, 12], Edge.RETRY),
        node(3, 2, [4], [5]),
    )
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert trained_tokens(found) == [[2, 11, 12, 5], [2]]
    assert found.account.dropped == {"superseded": 1}


def test_the_last_of_several_final_answers_stands():
    nodes = (node(0, None, [1], [2, 3], Edge.ROOT), node(1, None, [1], [4], Edge.RETRY))
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert trained_tokens(found) == [[4], [2]]
    assert found.account.dropped == {"superseded": 2}


def test_auxiliary_calls_are_dropped_with_what_extends_and_repeats_them():
    nodes = (
        node(0, None, [1], [2, 3], Edge.ROOT),
        node(1, None, [4], [5], Edge.AUXILIARY),
        node(2, 1, [6], [7]),
        node(3, None, [4], [8], Edge.RETRY, link=1),
        node(4, 0, [9], [10, 11], Edge.AUXILIARY),
        node(5, 0, [12], [13]),
    )
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert trained_tokens(found) == [[2, 3, 13], [2]]
    assert found.account.dropped == {"auxiliary": 5}


def test_the_reward_of_a_chain_of_summaries_and_of_its_sub_agents_is_that_of_all_their_tokens():
    nodes = (
        node(0, None, [1], [2], Edge.ROOT),
        node(1, 0, [3], [4]),
        node(2, None, [1, 4], [5], Edge.COMPACTION, link=1),
        node(3, None, [6], [7], Edge.SUBAGENT_CALL, link=2),
        node(4, 2, [7], [8], Edge.SUBAGENT_RETURN, link=3),
    )
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert trained_tokens(found) == [[2, 4], [7], [5, 8], [2]]
    assert [sample.advantage for sample in found.samples] == [-4.5, -4.5, -4.5, 4.5]


def test_two_summaries_of_the_same_words_are_no_retry_of_each_other():
    nodes = (
        node(0, None, [1], [2], Edge.ROOT),
        node(1, None, [3], [4], Edge.COMPACTION, link=0),
        node(2, None, [3], [5], Edge.RETRY, link=1),
        node(3, 1, [6], [2]),
        node(4, None, [3], [7], Edge.COMPACTION, link=3),
    )
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert trained_tokens(found)[:3] == [[2], [4, 2], [7]]
    assert found.account.dropped == {"superseded": 1}


def test_two_answers_to_one_prompt_that_both_go_on_are_two_branches():
    nodes = (
        node(0, None, [1], [2], Edge.ROOT),
        node(1, None, [1], [3], Edge.RETRY, link=0),
        node(2, 0, [4], [5]),
        node(3, 1, [4], [6]),
    )
    found = samples_of(group(rollout(0, nodes), PLAIN), rules(group_size=2))
    assert trained_tokens(found)[:2] == [[2, 5], [3, 6]]
    assert found.account.dropped == {}


def test_unscored_rollouts_are_outside_baseline_and_samples():
    lost = rollout(0, (node(0, None, [1], [2, 3], Edge.ROOT),), outcome=Outcome.INFRA_ERROR)
    pair = (rollout(1, PLAIN.nodes), rollout(2, PLAIN.nodes))
    found = samples_of(group(lost, *pair), rules(group_size=8))
    assert [sample.advantage for sample in found.samples] == [-1.0, 1.0]
    assert found.account.dropped == {"infra_error": 2}
    assert found.rewards == (1.0, 2.0)


def test_a_single_survivor_has_no_baseline_and_is_not_trained():
    found = samples_of(group(PLAIN), rules())
    assert (found.samples, found.account.dropped) == ((), {"no_baseline": 1})


def test_tokens_of_unknown_support_and_of_temperature_zero_are_masked():
    known = synthetic_group(GroupPlan(attempts=2), 0)
    found = samples_of(group(PLAIN, known.trajectories[1]), rules(needs_support=True))
    assert found.account.masked == {"support_unknown": 1}
    assert len(found.samples) == 1
    greedy = samples_of(known, rules(temperature=0.0))
    assert greedy.samples == ()
    assert greedy.account.masked == {"temperature_zero": greedy.account.drawn}


def test_experts_of_a_branch_cover_every_position_but_the_last():
    found = samples_of(synthetic_group(PLAN, 5), rules(ingest=INGEST))
    for sample in found.samples:
        assert (sample.experts[:-1] >= 0).all()
        assert (sample.experts[-1] == -1).all()


BEGINNINGS = [Edge.REWRITE, Edge.COMPACTION, Edge.SUBAGENT_CALL, Edge.AUXILIARY]
GOING_ON = [Edge.CONTINUATION, Edge.SUBAGENT_RETURN, Edge.AUXILIARY]


@st.composite
def sessions(draw):
    """Arbitrary trees: every edge, in any order of play, with and without links."""
    nodes = []
    for node_id in range(draw(st.integers(1, 9))):
        answer = draw(st.lists(st.integers(0, 63), max_size=4))
        started = draw(st.floats(0, 9))
        other = draw(st.sampled_from(nodes)) if nodes else None
        kind = draw(st.sampled_from(["retry", "begin", "go on", "go on"])) if nodes else "first"
        prompt = draw(st.lists(st.integers(0, 63), min_size=1, max_size=3))
        if kind == "first":
            made = node(node_id, None, prompt, answer, Edge.ROOT, started)
        elif kind == "retry":
            link = draw(st.sampled_from([None, other.node_id]))
            made = node(node_id, other.parent, other.prompt_ids, answer, Edge.RETRY, started, link)
        elif kind == "begin":
            made = node(node_id, None, prompt, answer, draw(st.sampled_from(BEGINNINGS)), started, other.node_id)
        else:
            made = node(node_id, other.node_id, prompt, answer, draw(st.sampled_from(GOING_ON)), started)
        nodes.append(made)
    return tuple(nodes)


@given(st.lists(sessions(), min_size=1, max_size=4), st.sampled_from(list(Outcome)))
def test_every_drawn_token_is_trained_once_masked_or_dropped_with_a_reason(trees, outcome):
    rollouts = [rollout(index, nodes) for index, nodes in enumerate(trees)]
    rollouts.append(rollout(99, trees[0], outcome=outcome, reward=0.5))
    found = samples_of(group(*rollouts), rules())
    account = found.account
    drawn = sum(len(node.completion.token_ids) for made in rollouts for node in made.nodes)
    assert account.drawn == drawn
    assert account.trained + sum(account.masked.values()) + sum(account.dropped.values()) == drawn
    assert account.trained == sum(int(sample.trained.sum()) for sample in found.samples)
    owned = Counter()
    for made in rollouts:
        owned.update(token for node in made.nodes for token in node.completion.token_ids)
    for sample in found.samples:
        owned.subtract(sample.token_ids[sample.trained].tolist())
    assert min(owned.values(), default=0) >= 0


@given(sessions())
def test_each_call_is_owned_by_one_branch_or_left_out_for_one_reason(nodes):
    found = branches_of(nodes)
    left_out = [one.node_id for one in (*found.superseded, *found.auxiliary)]
    owned = [node_id for branch in found.branches for node_id in branch.owned]
    assert sorted(left_out + owned) == [one.node_id for one in nodes]
    assert not {one.node_id for one in nodes if one.edge is Edge.AUXILIARY} & set(owned)
    for branch in found.branches:
        assert [one.parent for one in branch.nodes] == [None, *(one.node_id for one in branch.nodes[:-1])]


@given(st.integers(0, 200))
def test_synthetic_groups_are_valid(seed):
    assert all(defect(trajectory, INGEST) == "" for trajectory in synthetic_group(PLAN, seed).trajectories)


def broken(change):
    trajectory = synthetic_group(PLAN, 7).trajectories[0]
    first = trajectory.nodes[0]
    return replace(trajectory, nodes=(change(first), *trajectory.nodes[1:]))


def with_support(change):
    def changed(completion):
        support = completion.support
        ids = np.frombuffer(support.token_ids, "<u4").copy()
        logprobs = np.frombuffer(support.logprobs, "<f4").copy()
        counts = np.frombuffer(support.counts, "<u2").copy()
        change(counts, ids, logprobs)
        return {"support": Support(counts=counts.tobytes(), token_ids=ids.tobytes(), logprobs=logprobs.tobytes())}

    return lambda first: replace(first, completion=replace(first.completion, **changed(first.completion)))


def _assign(array, index, value):
    array[index] = value


DEFECTS = {
    "tree_broken": lambda first: replace(first, parent=5),
    "link_unknown": lambda first: replace(first, link=99),
    "prompt_empty": lambda first: replace(first, prompt_ids=()),
    "token_unknown": lambda first: replace(first, prompt_ids=(64,)),
    "logprobs_length": lambda first: replace(
        first, completion=replace(first.completion, sampler_logprobs=first.completion.sampler_logprobs[4:])
    ),
    "logprobs_invalid": lambda first: replace(
        first,
        completion=replace(
            first.completion, sampler_logprobs=np.full(len(first.completion.token_ids), np.nan, "<f4").tobytes()
        ),
    ),
    "versions_length": lambda first: replace(first, completion=replace(first.completion, versions=())),
    "versions_fall": lambda first: replace(
        first,
        completion=replace(
            first.completion, versions=(VersionRun(2, 1), VersionRun(1, len(first.completion.token_ids) - 1))
        ),
    ),
    "versions_unknown": lambda first: replace(
        first, completion=replace(first.completion, versions=(VersionRun(4, len(first.completion.token_ids)),))
    ),
    "support_length": with_support(lambda counts, ids, logprobs: _assign(counts, 0, counts[0] + 1)),
    "support_ids": with_support(lambda counts, ids, logprobs: _assign(ids, 0, 64)),
    "support_mass": with_support(lambda counts, ids, logprobs: _assign(logprobs, 0, np.nan)),
    "support_disagrees": lambda first: replace(
        first,
        completion=replace(
            first.completion, sampler_logprobs=np.full(len(first.completion.token_ids), -30.0, "<f4").tobytes()
        ),
    ),
    "experts_shape": lambda first: replace(
        first, completion=replace(first.completion, experts=replace(first.completion.experts, top_k=1))
    ),
    "experts_positions": lambda first: replace(
        first, completion=replace(first.completion, experts=replace(first.completion.experts, start=1))
    ),
    "experts_ids": lambda first: replace(
        first,
        completion=replace(
            first.completion,
            experts=replace(first.completion.experts, expert_ids=bytes(len(first.completion.experts.expert_ids))),
        ),
    ),
}


@pytest.mark.parametrize("reason", DEFECTS)
def test_a_record_that_contradicts_itself_is_left_out_by_reason(reason):
    assert defect(broken(DEFECTS[reason]), INGEST) == reason


def test_a_token_outside_its_support_is_found():
    def miss(first):
        support = first.completion.support
        ids = np.frombuffer(support.token_ids, "<u4")
        counts = np.frombuffer(support.counts, "<u2")
        absent = next(token for token in range(64) if token not in ids[: counts[0]])
        return replace(first, completion=replace(first.completion, token_ids=(absent, *first.completion.token_ids[1:])))

    assert defect(broken(miss), INGEST) == "support_misses_token"


def test_a_defective_rollout_is_no_score_and_its_tokens_are_counted():
    whole = synthetic_group(PLAN, 7)
    bad = broken(DEFECTS["support_mass"])
    found = samples_of(replace(whole, trajectories=(bad, *whole.trajectories[1:])), rules(ingest=INGEST))
    drawn = sum(len(node.completion.token_ids) for node in bad.nodes)
    assert found.account.dropped == {"support_mass": drawn}
    assert len(found.rewards) == 3
