"""Promises of the ATIF documents."""
# pyright: basic

import json
import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tree_kit import node

from etude.interfaces import ShownConversation
from etude.rollout.atif import Document
from etude.rollout.identity import HarnessIdentity
from etude.rollout.record import RolloutRecord, encode_record
from etude.rollout.untrusted import MAX_TEXT_CHARS
from etude.types import Edge, Failure, Node, Outcome, Trajectory

AGENT_ONLY = ("metrics", "reasoning_content", "tool_calls", "llm_call_count", "reasoning_effort")
CONVERSATION: tuple[dict[str, object], ...] = (
    {"role": "system", "content": "You repair code."},
    {"role": "user", "content": [{"type": "text", "text": "fix"}, {"type": "image_url"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "look first",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "ls"}'}},
            {"id": "c2", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": '}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    {"role": "tool", "tool_call_id": "zz", "content": "of nobody"},
    {"role": "assistant", "content": "done"},
)


NODES = (node(0, None, range(10), range(4), Edge.ROOT), node(1, 0, range(3), range(5)))
HARNESS = HarnessIdentity(name="my-agent", version="1.2.0", config_hash="ab12")


def record(
    messages: tuple[dict[str, object], ...], nodes: tuple[Node, ...] = NODES, **changes: object
) -> RolloutRecord:
    trajectory = Trajectory(
        rollout_id="g000001-2",
        group_id="g000001",
        task_id="t",
        index=2,
        outcome=Outcome.SCORED,
        reward=0.0,
        nodes=nodes,
        metrics={"odd": math.nan},
    )
    made = RolloutRecord(
        trajectory=trajectory, purpose="train", instruction="fix", harness=HARNESS, messages=messages, tools=()
    )
    return msgspec.structs.replace(made, **changes)


def check_rules(document: dict[str, object]) -> None:
    """The rules that ATIF's own validator checks."""
    allowed = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
    assert set(document) <= allowed | {"subagent_trajectories"}
    embedded = document.get("subagent_trajectories", [])
    assert len({one["trajectory_id"] for one in embedded}) == len(embedded)  # pyright: ignore
    for one in embedded:  # pyright: ignore
        check_rules(one)
    assert document["schema_version"] == "ATIF-v1.8"
    assert document["steps"]
    for number, step in enumerate(document["steps"], start=1):  # pyright: ignore
        assert step["step_id"] == number
        assert step["source"] in ("system", "user", "agent")
        assert isinstance(step["message"], str)
        if step["source"] != "agent":
            assert not set(AGENT_ONLY) & set(step)
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for call in step.get("tool_calls", ()):
            assert isinstance(call["arguments"], dict)
        for result in step.get("observation", {"results": ()})["results"]:
            assert result.get("source_call_id") is None or result["source_call_id"] in calls


def test_a_rollout_becomes_a_valid_document_with_its_reward_in_extra():
    document = json.loads(encode_record(record(CONVERSATION)))
    check_rules(document)
    assert document["extra"]["etude"]["reward"] == 0.0
    assert (document["agent"]["name"], document["agent"]["version"]) == ("my-agent", "1.2.0")
    assert document["extra"]["etude"]["harness_hash"] == "ab12"
    assert document["extra"]["etude"]["policy_versions"] == [3, 4]
    first = document["steps"][2]
    assert first["tool_calls"][0]["arguments"] == {"cmd": "ls"}
    assert first["tool_calls"][1]["arguments"] == {"_raw": '{"cmd": '}
    assert [result.get("source_call_id") for result in first["observation"]["results"]] == ["c1", None]
    assert document["final_metrics"]["total_completion_tokens"] == 9


def test_a_turn_carries_the_tokens_of_its_call_with_the_whole_context():
    document = json.loads(encode_record(record(CONVERSATION)))
    turns = [step for step in document["steps"] if step["source"] == "agent"]
    assert [turn["metrics"]["prompt_tokens"] for turn in turns] == [10, 17]
    assert [turn["metrics"]["completion_tokens"] for turn in turns] == [4, 5]
    assert turns[0]["extra"]["versions"] == [[3, 1], [4, 3]]


def test_tokens_are_not_guessed_when_two_branches_fit():
    nodes = (*NODES, node(2, 0, range(6), range(5), Edge.REWRITE))
    document = json.loads(encode_record(record(CONVERSATION, nodes)))
    assert all("metrics" not in step for step in document["steps"])


DELEGATED = (
    node(0, None, range(10), range(4), Edge.ROOT),
    node(1, None, range(7), range(3), Edge.SUBAGENT_CALL, link=0),
    node(2, 0, range(3), range(5), Edge.SUBAGENT_RETURN, link=1),
    node(3, None, range(6), range(2), Edge.REWRITE, link=2),
)
HELPER = ShownConversation(
    messages=({"role": "user", "content": "look"}, {"role": "assistant", "content": "seen"}), drawn_by=(1,)
)


def test_a_sub_agent_is_embedded_and_the_step_that_started_it_names_it():
    made = record(CONVERSATION, DELEGATED, drawn_by=(0, 2), others=(HELPER,))
    document = json.loads(encode_record(made))
    check_rules(document)
    (helper,) = document["subagent_trajectories"]
    assert helper["extra"] == {"node": 1, "edge": "subagent_call", "reason": "why", "link": 0}
    assert helper["steps"][1]["metrics"]["completion_tokens"] == 3
    named = [
        (step["step_id"], ref["trajectory_id"])
        for step in document["steps"]
        for result in step.get("observation", {"results": ()})["results"]
        for ref in result.get("subagent_trajectory_ref", ())
    ]
    assert named == [(3, helper["trajectory_id"])]


def test_answers_that_are_not_in_a_branch_are_copies_that_are_not_trained_on():
    document = json.loads(encode_record(record(CONVERSATION, DELEGATED, drawn_by=(None, 3))))
    turns = [step for step in document["steps"] if step["source"] == "agent"]
    assert [turn.get("is_copied_context", False) for turn in turns] == [True, False]
    assert ["metrics" in turn for turn in turns] == [False, True]


def test_the_tree_of_all_calls_is_kept_with_the_tools_that_they_call():
    made = record(CONVERSATION, DELEGATED, answers={0: CONVERSATION[2], 1: {"tool_calls": "odd"}})
    calls = json.loads(encode_record(made))["extra"]["etude"]["calls"]
    assert calls[0]["tools"] == ["shell", "shell"]
    assert [(call["node"], call.get("parent"), call["edge"], call.get("link")) for call in calls] == [
        (0, None, "root", None),
        (1, None, "subagent_call", 0),
        (2, 0, "subagent_return", 1),
        (3, None, "rewrite", 2),
    ]
    assert (calls[2]["prompt_tokens"], calls[2]["drawn_tokens"], calls[2]["versions"]) == (3, 5, [3, 4])


def test_a_rollout_without_a_call_still_shows_its_instruction_and_failure():
    broken = record((), ())
    failure = Failure(component="sandbox", reason="sandbox", message="no space")
    trajectory = msgspec.structs.replace(
        broken.trajectory, outcome=Outcome.INFRA_ERROR, reward=None, failure=failure, nodes=()
    )
    document = json.loads(encode_record(msgspec.structs.replace(broken, trajectory=trajectory)))
    check_rules(document)
    assert document["steps"][0]["message"] == "fix"
    assert document["extra"]["etude"]["failure"]["component"] == "sandbox"
    assert "reward" not in document["extra"]["etude"]


def test_replaced_attempts_do_not_overwrite_each_other():
    first = record(())
    again = msgspec.structs.replace(first.trajectory, rollout_id="g000001-2r1")
    assert first.key == "rollouts/g000001/2.json"
    assert msgspec.structs.replace(first, trajectory=again).key == "rollouts/g000001/2r1.json"


texts = st.sampled_from(["", "c1", "\ud800", "\x00\x1b[2J", "<script>", '{"cmd": [1]}', '{"\ud800": NaN}', "{", "é"])
leaves = st.none() | st.booleans() | st.floats() | st.sampled_from([1, 2**70, -(2**64)]) | texts
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
odd_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "function", "\ud800"])},
    optional={
        "content": json_values,
        "tool_call_id": json_values,
        "reasoning_content": json_values,
        "tool_calls": json_values
        | st.lists(
            st.fixed_dictionaries(
                {"id": json_values, "function": st.fixed_dictionaries({"name": json_values, "arguments": json_values})}
            ),
            max_size=3,
        ),
    },
)


@given(st.lists(odd_messages, max_size=8), st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=2))
def test_no_conversation_however_odd_breaks_the_document(
    messages: list[dict[str, object]], tools: list[dict[str, object]]
):
    encoded = encode_record(record(tuple(messages), tools=tuple(tools)))
    check_rules(json.loads(encoded))
    assert msgspec.json.decode(encoded, type=Document).extra.etude.task_id == "t"


def test_texts_are_bounded():
    deep: object = "x"
    for _ in range(200):
        deep = [deep]
    long: dict[str, object] = {"role": "user", "content": "a" * (MAX_TEXT_CHARS + 7)}
    odd: dict[str, object] = {"role": "user", "content": {"deep": deep}}
    document = json.loads(encode_record(record((long, odd))))
    assert document["steps"][0]["message"].endswith("[7 more characters]")
    assert "nested too deeply" in document["steps"][1]["message"]
