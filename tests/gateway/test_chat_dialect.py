# pyright: basic
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.dialects.chat import parse_request
from etude.gateway.dialects.dialect import MAX_MESSAGES, MAX_TOOLS
from etude.gateway.refusals import CallRefusedError

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


def nested(depth):
    return {} if depth == 0 else {"properties": nested(depth - 1)}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"\xff",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 100_000,
        {},
        {"messages": []},
        {"messages": [USER] * (MAX_MESSAGES + 1)},
        {"messages": [{"role": "root", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [USER], "tools": [TOOL] * (MAX_TOOLS + 1)},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": nested(40)}}]},
        {"messages": [USER], "n": 2},
        {"messages": [USER], "temperature": "hot"},
        {"messages": [USER], "tool_choice": "required"},
        {"messages": [USER], "response_format": {"type": "json_object"}},
        {"messages": [USER], "functions": []},
    ],
)
def test_what_cannot_be_served_is_a_400(body):
    with pytest.raises(CallRefusedError) as caught:
        parse_request(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.text() | st.integers(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["messages", "role", "content", "tools", "stop"]), x),
    )
)
def test_no_body_crashes_the_parser(body):
    with suppress(CallRefusedError):
        parse_request(body if isinstance(body, bytes) else json.dumps(body).encode())


def test_text_parts_developer_messages_and_unknown_fields_are_made_plain():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "audio": {}, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
    ]
    chat = parse_request(json.dumps({"messages": messages, "tools": [TOOL], "metadata": {}}).encode())
    assert chat.conversation.messages == (
        {"role": "system", "content": "a\nb"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "id": "1", "type": "function"}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    )
    assert chat.conversation.tools == (TOOL,)
