# pyright: basic
"""Bodies that are made to take long."""

import json

import pytest

from etude.gateway.api import DIALECTS
from etude.gateway.dialects.dialect import MAX_TOOLS_BYTES
from etude.gateway.refusals import CallRefusedError

BY_PATH = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
USER = {"role": "user", "content": "hi"}


def body(*, schema, unknown="null"):
    function = {"name": "f", "parameters": "SCHEMA", "input_schema": "SCHEMA"}
    fields = {"messages": [USER], "input": [USER], "max_tokens": 9, "unknown": "UNKNOWN"}
    tool = {"type": "function", "function": function, **function}
    text = json.dumps(fields | {"tools": [tool]})
    return text.replace('"SCHEMA"', schema).replace('"UNKNOWN"', unknown).encode()


@BY_PATH
def test_tools_are_not_read_when_there_is_too_much_of_them(dialect):
    dialect.parse(body(schema="{}"))
    with pytest.raises(CallRefusedError, match="tools: more than") as refusal:
        dialect.parse(body(schema='{"a": [' + "[]," * (MAX_TOOLS_BYTES // 3) + "[]]}"))
    assert refusal.value.status == 400


@BY_PATH
@pytest.mark.parametrize("nested", ["[" * 1_000_000, '{"a":' * 500_000, "[" * 500 + "]" * 500])
def test_deep_values_are_refused_wherever_they_are(dialect, nested):
    for told in (body(schema=nested), body(schema="{}", unknown=nested + "!")):
        with pytest.raises(CallRefusedError) as refusal:
            dialect.parse(told)
        assert refusal.value.status == 400


@BY_PATH
def test_half_a_million_unknown_keys_are_passed_over(dialect):
    keys = ",".join(f'"{number:x}":0' for number in range(300_000))
    assert dialect.parse(body(schema="{}", unknown="{" + keys + "}")).conversation.messages == (USER,)


@BY_PATH
@pytest.mark.parametrize("charset", ["utf-16", "utf-32", "latin-1", "utf-8-sig"])
def test_other_charsets_than_utf_8_are_refused(dialect, charset):
    text = body(schema="{}").decode().replace('"hi"', '"ü"').encode(charset)
    with pytest.raises(CallRefusedError) as refusal:
        dialect.parse(text)
    assert refusal.value.status == 400
