# pyright: basic
import itertools
import random
import struct

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError, StoreError
from etude.store.groups import decode_advantages, decode_group, encode_group, group_key
from etude.types import (
    Completion,
    Edge,
    Experts,
    Failure,
    FinishReason,
    Group,
    Node,
    Outcome,
    Support,
    Trajectory,
    VersionRun,
)

TOKENS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(max_size=8)


@st.composite
def completions(draw) -> Completion:
    n = draw(st.integers(0, 6))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    edges = [0, *cuts, n] if n else [0]
    versions = tuple(VersionRun(10 + i, b - a) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    support = None
    if draw(st.booleans()):
        counts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        size = 4 * sum(counts)
        support = Support(
            counts=struct.pack(f"<{n}H", *counts),
            token_ids=draw(st.binary(min_size=size, max_size=size)),
            logprobs=draw(st.binary(min_size=size, max_size=size)),
        )
    experts = None
    if draw(st.booleans()):
        size = draw(st.integers(0, 3)) * 2 * 2 * 2
        experts = Experts(
            start=draw(st.integers(0, 9)),
            num_layers=2,
            top_k=2,
            expert_ids=draw(st.binary(min_size=size, max_size=size)),
        )
    return Completion(
        token_ids=tuple(draw(st.lists(TOKENS, min_size=n, max_size=n))),
        sampler_logprobs=draw(st.binary(min_size=4 * n, max_size=4 * n)),
        versions=versions,
        finish_reason=draw(st.sampled_from(FinishReason)),
        pool=draw(TEXT),
        lineage=draw(TEXT),
        support=support,
        experts=experts,
        cached_tokens=draw(st.integers(0, 99)),
    )


NODES = st.builds(
    Node,
    node_id=st.integers(0, 9),
    parent=st.none() | st.integers(0, 9),
    edge=st.sampled_from(Edge),
    reason=st.sampled_from(["", "same_prompt"]),
    link=st.none() | st.integers(0, 9),
    prompt_ids=st.lists(TOKENS, max_size=5).map(tuple),
    completion=completions(),
    started_s=FLOATS,
    seconds=FLOATS,
)
NAMED = st.dictionaries(TEXT, FLOATS, max_size=3)


@st.composite
def groups(draw) -> Group:
    group_id, task_id = draw(TEXT), draw(TEXT)
    trajectories = tuple(
        Trajectory(
            rollout_id=f"{group_id}-{index}",
            group_id=group_id,
            task_id=task_id,
            index=index,
            outcome=draw(st.sampled_from(Outcome)),
            reward=draw(st.none() | FLOATS),
            nodes=tuple(draw(st.lists(NODES, max_size=3))),
            failure=draw(st.none() | st.builds(Failure, component=TEXT, reason=TEXT, message=TEXT)),
            harness_exit=draw(st.none() | st.integers(-64, 255)),
            seconds=draw(FLOATS),
            timings=draw(NAMED),
            metrics=draw(NAMED),
        )
        for index in range(draw(st.integers(1, 4)))
    )
    return Group(
        group_id=group_id,
        task_id=task_id,
        ticket=draw(st.integers(0, 2**40)),
        admitted_version=draw(st.integers(0, 2**40)),
        trajectories=trajectories,
    )


@given(groups(), st.data())
def test_a_group_is_read_as_it_was_written(group, data):
    count = len(group.trajectories)
    advantages = data.draw(st.lists(st.none() | FLOATS, min_size=count, max_size=count))
    file = encode_group(group, advantages)
    assert decode_group(file) == group
    assert decode_advantages(file) == tuple(advantages)


def a_node(**changes) -> Node:
    completion = {
        "token_ids": (5, 6),
        "sampler_logprobs": struct.pack("<2f", -0.5, -0.25),
        "versions": (VersionRun(1, 1), VersionRun(2, 1)),
        "finish_reason": FinishReason.STOP,
        "pool": "full",
    }
    return Node(
        node_id=0, parent=None, edge=Edge.ROOT, prompt_ids=(1, 2, 3), completion=Completion(**completion | changes)
    )


def a_group(*nodes: Node) -> Group:
    lost = Trajectory(group_id="g", task_id="t", rollout_id="g-1", index=1, outcome=Outcome.INFRA_ERROR)
    scored = msgspec.structs.replace(lost, rollout_id="g-0", index=0, outcome=Outcome.SCORED, reward=1.0, nodes=nodes)
    return Group(group_id="g", task_id="t", ticket=0, admitted_version=1, trajectories=(scored, lost))


def test_people_find_one_row_per_call_and_one_per_rollout_without_calls():
    table = pq.read_table(pa.BufferReader(encode_group(a_group(a_node(), a_node()), [0.5, None])))
    assert table.column("rollout_id").to_pylist() == ["g-0", "g-0", "g-1"]
    assert table.column("logprobs").to_pylist() == [[-0.5, -0.25], [-0.5, -0.25], None]
    assert table.column("versions").to_pylist() == [[1, 2], [1, 2], None]
    assert table.column("advantage").to_pylist() == [0.5, 0.5, None]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler_logprobs": bytes(7)},
        {"versions": (VersionRun(1, 3),)},
        {"versions": (VersionRun(1, 1), VersionRun(1, 1))},
        {"versions": (VersionRun(1, 2), VersionRun(2, 0))},
        {"support": Support(counts=bytes(3), token_ids=b"", logprobs=b"")},
        {"support": Support(counts=struct.pack("<2H", 1, 1), token_ids=bytes(8), logprobs=bytes(4))},
        {"experts": Experts(start=0, num_layers=2, top_k=2, expert_ids=bytes(7))},
        {"experts": Experts(start=0, num_layers=0, top_k=2, expert_ids=b"")},
        {"token_ids": (5, 2**31)},
        {"token_ids": (5, 2**80)},
    ],
)
def test_a_group_whose_arrays_do_not_fit_each_other_is_not_written(changes):
    with pytest.raises(ValueError, match=r"tokens|experts|column"):
        encode_group(a_group(a_node(**changes)), [0.5, None])


def test_a_group_without_rollouts_or_with_strangers_is_not_written():
    group = a_group(a_node())
    first = group.trajectories[0]
    with pytest.raises(ValueError, match="0 trajectories"):
        encode_group(msgspec.structs.replace(group, trajectories=()), [])
    with pytest.raises(ValueError, match="1 advantages"):
        encode_group(group, [0.0])
    with pytest.raises(ValueError, match="two trajectories"):
        encode_group(msgspec.structs.replace(group, trajectories=(first, first)), [0.0, 0.0])
    with pytest.raises(ValueError, match="of group 'x'"):
        encode_group(
            msgspec.structs.replace(group, trajectories=(msgspec.structs.replace(first, group_id="x"),)), [0.0]
        )


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_a_damaged_file_is_refused_by_type(rng: random.Random):
    group = a_group(a_node(), a_node(support=Support(counts=bytes(4), token_ids=b"", logprobs=b"")))
    file = bytearray(encode_group(group, [0.5, None]))
    for _ in range(rng.randint(1, 3)):
        file[rng.randrange(len(file))] = rng.randrange(256)
    damaged = bytes(file[: rng.randrange(len(file))]) if rng.random() < 0.3 else bytes(file)
    try:
        decode_group(damaged)
    except IntegrityError:
        return


def rewritten(change) -> bytes:
    table = pq.read_table(pa.BufferReader(encode_group(a_group(a_node()), [0.5, None])))
    sink = pa.BufferOutputStream()
    pq.write_table(change(table), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["reward"]),
        lambda table: table.append_column("more", pa.array([1, 2])),
        lambda table: table.slice(0, 0),
        lambda table: with_column(table, "group_id", ["g", "h"]),
        lambda table: with_column(table, "outcome", ["scored", "won"]),
        lambda table: with_column(table, "token_ids", [None, None]),
        lambda table: with_column(table, "token_ids", [[1], None]),
        lambda table: with_column(table, "logprobs", [[None, 1.0], None]),
        lambda table: with_column(table, "versions", [[1], None]),
        lambda table: with_column(table, "timings", [None, None]),
        lambda table: with_column(table, "index", [None, 1]),
        lambda table: with_column(table, "support_counts", [[1, 2], None]),
        lambda table: with_column(table, "expert_ids", [b"x", None]),
    ],
)
def test_a_well_formed_file_that_is_no_group_is_refused(change):
    assert decode_group(rewritten(lambda table: table)) == a_group(a_node())
    with pytest.raises(IntegrityError):
        decode_group(rewritten(change))


def test_a_file_from_before_edges_had_reasons_is_read():
    old = rewritten(lambda table: table.drop_columns(["reason", "link"]))
    assert decode_group(old) == a_group(a_node())


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def test_a_group_lies_under_the_version_it_was_trained_into():
    assert group_key(3, "pyfix-0001.2") == "groups/3/pyfix-0001.2.parquet"
    with pytest.raises(StoreError, match="not allowed"):
        group_key(3, "../../x")
