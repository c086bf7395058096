# pyright: basic, reportArgumentType=false, reportIndexIssue=false
"""What Messages and Responses bodies mean, and which are refused."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.api import DIALECTS
from etude.gateway.conversation import message_key
from etude.gateway.dialects import messages, responses
from etude.gateway.dialects.dialect import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from etude.gateway.refusals import CallRefusedError
from etude.gateway.volatile import DECLARED, strip_volatile

USER = {"role": "user", "content": "x"}
B = {"type": "function", "name": "b"}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
ANSWER_A, ANSWER_B = (f"call_{letter * 24}" for letter in "ab")


def nested(depth):
    return {} if depth == 0 else {"properties": nested(depth - 1)}


def blocks(*content, role="user"):
    return {"messages": [{"role": role, "content": list(content)}, USER]}


def items(*content):
    return {"input": list(content)}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"a": "\xff"}}]}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b'[{"name":"f","input_schema":' * 50_000,
        {},
        {"messages": []},
        {"messages": [USER] * (MAX_MESSAGES + 1)},
        {"messages": [{"role": "root", "content": "x"}]},
        {"messages": [USER, {"role": "assistant", "content": "prefilled"}]},
        {"messages": [USER], "tool_choice": {"type": "any"}},
        {"messages": [USER], "tool_choice": {"type": "tool", "name": "f"}},
        {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"messages": [USER], "output_format": {"type": "json_schema"}},
        {"messages": [USER], "tools": [CLAUDE_TOOL] * (MAX_TOOLS + 1)},
        {"messages": [USER], "tools": [CLAUDE_TOOL | {"input_schema": nested(40)}]},
        {"messages": [USER], "tools": [CLAUDE_TOOL | {"description": "x" * (1 << 20)}]},
        {"messages": [USER], "system": [{"type": "image"}]},
        {"messages": [USER], "max_tokens": "all"},
        blocks({"type": "image", "source": {}}),
        blocks({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
        blocks({"type": "server_tool_use"}, role="assistant"),
        blocks({"type": "tool_use", "id": "1", "name": "f", "input": [1]}, role="assistant"),
        blocks(*[{"type": "tool_use", "id": "1", "name": "f"}] * (MAX_TOOL_CALLS + 1), role="assistant"),
    ],
)
def test_a_messages_body_that_cannot_be_served_is_a_400(body):
    with pytest.raises(CallRefusedError) as caught:
        messages.parse_request(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b"\xff",
        b'{"input": ' + b"[" * 100_000,
        {},
        {"input": []},
        {"input": 3},
        {"input": [USER] * (MAX_MESSAGES + 1)},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "conversation": "conv_1"},
        {"input": "x", "background": True},
        {"input": "x", "tool_choice": "required"},
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": nested(40)}]},
        {
            "input": "x",
            "tools": [{"type": "function", "name": "a__b"}, {"type": "namespace", "name": "a", "tools": [B]}],
        },
        items({"role": "root", "content": "x"}),
        items({"type": "item_reference", "id": "msg_1"}),
        items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
        items({"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}),
    ],
)
def test_a_responses_body_that_cannot_be_served_is_a_400(body):
    with pytest.raises(CallRefusedError) as caught:
        responses.parse_request(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


WORDS = ["messages", "input", "role", "content", "type", "text", "message", "tool_use", "reasoning", "tools", "user"]


@given(
    st.recursive(
        st.none() | st.sampled_from(WORDS) | st.integers() | st.floats() | st.text(max_size=3),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(WORDS), x),
    )
)
def test_no_body_crashes_a_parser(body):
    for dialect in DIALECTS:
        with suppress(CallRefusedError):
            dialect.parse(json.dumps(body).encode())


def test_blocks_of_messages_become_the_messages_of_a_conversation():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    body = {
        "system": [{"type": "text", "text": "be", "cache_control": {}}, {"type": "text", "text": "brief"}],
        "tools": [CLAUDE_TOOL | {"description": "d"}, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 10**30,
        "messages": [
            USER,
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "so"}]},
            {"role": "assistant", "content": [call]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                    {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                    {"type": "text", "text": "and"},
                ],
            },
        ],
    }
    asked = messages.parse_request(json.dumps(body).encode())
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert list(asked.conversation.messages) == [
        {"role": "system", "content": "be\nbrief"},
        USER,
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "and"},
    ]
    shown = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert asked.conversation.tools == ({"type": "function", "function": shown},)
    assert asked.requested == {
        "max_tokens": str(10**30),
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "left_out_tools": ["web_search_20250305"],
    }


def test_items_of_responses_become_the_messages_of_a_conversation():
    body = {
        "instructions": "be brief",
        "tools": [{"type": "custom", "name": "patch", "format": {}}, {"type": "web_search"}],
        "reasoning": {"effort": "high", "summary": None},
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            USER,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a "b"'},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "r"},
        ],
    }
    asked = responses.parse_request(json.dumps(body).encode())
    function = {"name": "patch", "arguments": '{"input":"a \\"b\\""}'}
    assert list(asked.conversation.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "a"},
        USER,
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    assert asked.custom_tools == {"patch"}
    assert asked.requested == {"reasoning": {"effort": "high"}, "left_out_tools": ["web_search"]}


def test_tools_that_the_input_tells_and_words_of_other_agents_are_known():
    told = {"type": "additional_tools", "role": "developer", "tools": [B, {"type": "web_search"}]}
    words = [{"type": "input_text", "text": "Payload:\n"}, {"type": "encrypted_content", "encrypted_content": "go"}]
    asked = responses.parse_request(
        json.dumps({"input": [told, {"type": "agent_message", "author": "/root", "content": words}, USER]}).encode()
    )
    assert asked.conversation.messages == ({"role": "user", "content": "Payload:\ngo"}, USER)
    assert [tool["function"]["name"] for tool in asked.conversation.tools] == ["b"]
    assert asked.requested == {"left_out_tools": ["web_search"]}


def test_the_policy_reads_the_grammar_of_a_custom_tool():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    body = {"input": "x", "tools": [{"type": "custom", "name": "patch", "format": grammar}]}
    (tool,) = responses.parse_request(json.dumps(body).encode()).conversation.tools
    assert "(lark):\\nstart: WORD" in json.dumps(tool)


def call_item(call_id):
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def result_item(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": call_id}


def shapes(*content):
    body = json.dumps({"input": [USER, *content]}).encode()
    return [
        (message["role"], len(message.get("tool_calls", ())))
        for message in responses.parse_request(body).conversation.messages[1:]
    ]


def test_parallel_calls_are_one_answer_wherever_their_results_stand():
    first, second, later = f"{ANSWER_A}_0", f"{ANSWER_A}_1", f"{ANSWER_B}_0"
    calls, results = [call_item(first), call_item(second)], [result_item(first), result_item(second)]
    apart = [calls[0], results[0], calls[1], results[1]]
    expected = [("assistant", 2), ("tool", 0), ("tool", 0)]
    assert shapes(*calls, *results) == shapes(*apart) == expected
    assert shapes(*apart, call_item(later), result_item(later)) == [*expected, ("assistant", 1), ("tool", 0)]


def test_calls_with_foreign_ids_are_answers_of_their_own():
    assert shapes(call_item("call_1"), result_item("call_1"), call_item("call_2"), result_item("call_2")) == [
        ("assistant", 1),
        ("tool", 0),
        ("assistant", 1),
        ("tool", 0),
    ]


def test_a_nonce_in_the_system_prompt_is_taken_out_and_handed_back():
    line = "x-anthropic-billing-header: cc_version=2.1; cch=7f3a1;"
    body = {
        "system": [{"type": "text", "text": line}, {"type": "text", "text": "You are."}],
        "messages": [{"role": "user", "content": line}],
    }
    conversation, removed = strip_volatile(messages.parse_count(json.dumps(body).encode()), DECLARED)
    assert list(conversation.messages) == [{"role": "system", "content": "You are."}, {"role": "user", "content": line}]
    assert removed == [f"{line}\n"]


@pytest.mark.parametrize(
    ("drawn", "sent_back"),
    [
        ("1.0", "1"),
        ("1e3", "1000"),
        ("12345678901234567891", "12345678901234567000"),
        ("-0.0", "0"),
        ("[2.50]", "[2.5]"),
    ],
)
def test_numbers_that_javascript_respells_are_the_same_arguments(drawn, sent_back):
    keys = [
        message_key(
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": {number}}}'}}]}
        )
        for number in (drawn, sent_back, "7")
    ]
    assert keys[0] == keys[1] != keys[2]
