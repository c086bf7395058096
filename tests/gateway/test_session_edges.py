# pyright: basic, reportOptionalMemberAccess=false
"""Random sessions of a harness that retries, forks, compacts, delegates, rewrites and runs ahead of itself."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from session_kit import MOVES, play

from etude.algorithm.branches import branches_of
from etude.algorithm.trees import edge_problem, tree_problem
from etude.types import Edge

scripts = st.lists(st.sampled_from(sorted(MOVES)), max_size=8)


def path(by_id, node):
    return [node] if node.parent is None else [*path(by_id, by_id[node.parent]), node]


@settings(max_examples=60)
@given(scripts)
def test_each_call_is_what_the_harness_meant_by_it(script):
    harness, record = asyncio.run(play(script))
    found = {node.node_id: (node.edge.value, node.link) for node in record.nodes}
    for node_id, (edge, link) in enumerate(harness.expected):
        assert found[node_id][0] == edge, (node_id, record.nodes)
        assert link is ... or found[node_id][1] == link
    assert all(node.reason for node in record.nodes)


@settings(max_examples=60)
@given(scripts)
def test_every_session_is_a_tree_in_which_each_token_was_drawn_once(script):
    harness, record = asyncio.run(play(script))
    assert (tree_problem(record.nodes), edge_problem(record.nodes)) == ("", "")
    by_id = {node.node_id: node for node in record.nodes}
    branches = {node.node_id: path(by_id, node) for node in record.nodes}
    told = [
        [token for part in branch for token in (*part.prompt_ids, *part.completion.token_ids)]
        for branch in branches.values()
    ]
    assert sorted(told) == sorted(harness.sampler.sequences.values())
    for branch, tokens in zip(branches.values(), told, strict=True):
        rows = [part.completion.experts for part in branch]
        ends = [part.start + part.num_positions for part in rows]
        assert [part.start for part in rows] == [0, *ends[:-1]]
        assert ends[-1] == len(tokens) - 1


@settings(max_examples=60)
@given(scripts)
def test_every_drawn_token_is_trained_once_or_dropped_for_one_reason(script):
    _, record = asyncio.run(play(script))
    found = branches_of(record.nodes)
    owned = Counter(node_id for branch in found.branches for node_id in branch.owned)
    left_out = Counter(node.node_id for node in (*found.superseded, *found.auxiliary))
    assert owned + left_out == Counter(node.node_id for node in record.nodes)
    assert {node.edge for node in found.auxiliary} <= {Edge.AUXILIARY}
    assert len(found.auxiliary) == script.count("title")


@settings(max_examples=30)
@given(scripts)
def test_only_rewrites_and_changed_tools_break_a_prefix(script):
    _, record = asyncio.run(play(script))
    breaks = script.count("rewrite") + script.count("change_tools")
    assert record.metrics["gateway/prefix_break_rate"] == breaks / len(record.nodes)
    assert sum(record.metrics[f"gateway/edges_{edge.value}"] for edge in Edge) == len(record.nodes)


@settings(max_examples=30)
@given(scripts)
def test_people_see_each_conversation_with_who_drew_its_answers(script):
    _, record = asyncio.run(play(script))
    for shown in (record, *record.others):
        answers = [message for message in shown.messages if message["role"] == "assistant"]
        assert len(answers) == len(shown.drawn_by)
        assert shown.drawn_by[-1] is not None
    assert len(record.others) >= script.count("compact") + script.count("delegate") + script.count("title")
