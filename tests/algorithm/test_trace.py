# pyright: basic
"""Promises of the training traces, checked as a strict reader of the format checks them."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_kit import node

from etude.algorithm.branches import branches_of
from etude.algorithm.trace import training_trace
from etude.types import Edge


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    node_id: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, object]
    response: dict[str, object]
    metadata: dict[str, object]


class Trace(msgspec.Struct, forbid_unknown_fields=True):
    schema_version: int
    turns: list[Turn]


def read(encoded):
    """Return a trace that has none of the faults for which readers refuse a row."""
    trace = msgspec.json.decode(encoded, type=Trace)
    assert trace.schema_version == 1
    assert len({turn.node_id for turn in trace.turns}) == len(trace.turns)
    for turn in trace.turns:
        prompt, drawn = len(turn.prompt_token_ids), len(turn.completion_token_ids)
        assert prompt
        assert drawn
        assert min(turn.prompt_token_ids + turn.completion_token_ids) >= 0
        assert len(turn.per_token_logps) == drawn
        assert all(math.isfinite(logp) and logp <= 0 for logp in turn.per_token_logps)
        assert turn.loss_mask == [0] * prompt + [1] * drawn
    return trace


def traced(*nodes):
    return read(msgspec.json.encode(training_trace(nodes, sampling={"temperature": 1.0})))


def test_a_turn_holds_all_that_the_model_read_and_drew_and_where_it_hangs():
    trace = traced(node(0, None, [1, 2], [3], Edge.ROOT), node(1, 0, [4], [5, 6]))
    assert trace.turns[1].prompt_token_ids == [1, 2, 3, 4]
    assert trace.turns[1].completion_token_ids == [5, 6]
    assert trace.turns[1].response == {"finish_reason": "stop"}
    assert trace.turns[1].metadata == {
        "parent": "n0",
        "edge": "continuation",
        "reason": "why",
        "link": None,
        "weight_version": [3, 4],
        "lineage": "",
        "pool": "local",
        "sampling": {"temperature": 1.0},
    }


def test_what_is_not_trained_on_is_left_out():
    trace = traced(
        node(0, None, [1], [2], Edge.ROOT),
        node(1, None, [7], [8], Edge.AUXILIARY),
        node(2, None, [1], [3], Edge.RETRY, link=0),
        node(3, 2, [4], [5]),
    )
    assert [turn.node_id for turn in trace.turns] == ["n2", "n3"]


def test_a_log_probability_that_rounding_put_above_0_is_0():
    assert traced(node(0, None, [1], [2], Edge.ROOT, logp=1e-7)).turns[0].per_token_logps == [0.0]


@pytest.mark.parametrize("field", ["reward", "logprobs"])
def test_the_reader_of_these_tests_refuses_what_the_format_does_not_know(field):
    with pytest.raises(msgspec.ValidationError, match=field):
        read(msgspec.json.encode({"schema_version": 1, "turns": [], field: 1}))


@given(st.lists(st.tuples(st.integers(-1, 8), st.sampled_from(Edge)), min_size=1, max_size=9))
def test_each_token_that_can_be_trained_on_is_in_one_turn(shapes):
    nodes = [
        node(n, parent if 0 <= parent < n else None, [10 + n], [20 + n, 40 + n], edge)
        for n, (parent, edge) in enumerate(shapes)
    ]
    owned = {node_id for branch in branches_of(nodes).branches for node_id in branch.owned}
    drawn = [token for turn in traced(*nodes).turns for token in turn.completion_token_ids]
    assert sorted(drawn) == sorted(token for one in nodes if one.node_id in owned for token in one.completion.token_ids)
