# pyright: basic, reportArgumentType=false
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.conversation import Conversation
from etude.gateway.spelling import OwnCalls
from etude.types import Edge

USER = {"role": "user", "content": "fix it"}
RESULT = {"role": "tool", "content": "done"}


def answer(arguments, *, name="edit", call_id="call_c_0"):
    told = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": told}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


def restored(drawn, told):
    own = OwnCalls()
    drawn["tool_calls"] = own.issue([{"function": call["function"]} for call in drawn["tool_calls"]], "c")
    return own.restore(Conversation(messages=(USER, told, RESULT))).messages[1]


# Each is what a Claude Code made of the call before it ran it.
@pytest.mark.parametrize(
    ("drawn", "told"),
    [
        ({"path": "a", "old": "x"}, {"replace_all": False, "path": "a", "old": "x"}),
        ({"content": "a   \nb  \n\n"}, {"content": "a\nb\n\n"}),
        ({"timeout": "1000", "background": "false"}, {"timeout": 1000, "background": False}),
        ({"timeout": 1000.0}, {"timeout": 1000}),
        ({"command": "find -exec a {} \\\\;"}, {"command": "find -exec a {} \\;"}),
        ({"edits": [{"old": "a "}, {"old": "b"}]}, {"edits": [{"old": "a", "all": False}, {"old": "b"}]}),
    ],
)
def test_a_call_that_a_harness_tidied_is_put_back_as_it_was_drawn(drawn, told):
    assert restored(answer(drawn), answer(told)) == answer(drawn)


def test_a_name_that_a_harness_found_in_another_case_is_as_it_was_drawn():
    """opencode runs `bash` for a policy that calls `Bash`."""
    assert restored(answer({"a": 1}, name="Edit"), answer({"a": 1}, name="edit")) == answer({"a": 1}, name="Edit")


@pytest.mark.parametrize(
    "told",
    [
        answer({"path": "a"}),
        answer({"path": "a", "old": "cut"}),
        answer({}),
        answer({"path": ["a"], "old": "x"}),
        answer({"path": "a", "old": "x"}, name="write"),
        answer({"path": "a", "old": "x ", "all": True}, call_id="another"),
        answer("[1]"),
        answer("{"),
        answer('{"path": ' + "[" * 5000),
    ],
)
def test_a_call_that_says_anything_else_stays_as_the_harness_told_it(told):
    assert restored(answer({"path": "a", "old": "x"}), told) == told


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=3), st.dictionaries(st.text(max_size=3), values))
def test_a_call_is_found_however_its_json_is_spelled_and_whatever_was_added(drawn, added):
    told = answer(json.dumps(added | drawn, indent=2, sort_keys=True))
    assert restored(answer(drawn), told) == answer(drawn)


async def test_a_tidied_call_continues_the_tokens_that_were_drawn_and_a_rewritten_one_branches(serve):
    drawn = '<tool_call>{"name": "edit", "arguments": {"path": "a", "limit": "5"}}</tool_call>'
    async with serve([drawn, "done", "done"]) as served:
        _, body = await served.ask(USER)
        told = body["choices"][0]["message"]
        told["tool_calls"][0]["function"]["arguments"] = '{"all": false, "limit": 5, "path": "a"}'
        await served.ask(USER, told, RESULT)
        told["tool_calls"][0]["function"]["arguments"] = '{"path": "a"}'
        await served.ask(USER, told, RESULT)
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.REWRITE]
