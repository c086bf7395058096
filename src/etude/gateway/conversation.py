"""What makes two messages the same: role, text and tool calls, whatever a harness did to the JSON around them."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from typing import cast

import msgspec

_EXACT = 1 << 53
"""Whole numbers below are the same in every language."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness asks for, in OpenAI's shapes: `content` is always text, `arguments` always a string."""

    messages: tuple[dict[str, object], ...]
    tools: tuple[dict[str, object], ...] = ()


def message_key(message: Mapping[str, object]) -> bytes:
    """Return a digest that is equal for messages that mean the same.

    Ids of tool calls and reasoning do not count: harnesses renew the one and drop the other. An assistant's text
    counts without its surrounding white space and its arguments as JSON values, because harnesses trim and re-spell
    both; what others said counts byte for byte, because it was rendered byte for byte.
    """
    text = str(message.get("content") or "")
    if message["role"] != "assistant":
        return sha256(msgspec.json.encode([message["role"], text])).digest()
    calls = cast("Sequence[Mapping[str, Mapping[str, str]]]", message.get("tool_calls") or ())
    spelled = [[call["function"]["name"], _canonical_json(call["function"]["arguments"])] for call in calls]
    return sha256(msgspec.json.encode(["assistant", text.strip(), spelled])).digest()


def tools_key(tools: Sequence[Mapping[str, object]]) -> bytes:
    """Return a digest of the tool definitions, in their order."""
    return sha256(msgspec.json.encode(tools, order="deterministic")).digest()


def extend_history(history: bytes, key: bytes) -> bytes:
    """Return the digest of a history to which the message with this key is added; the empty history is `b""`."""
    return sha256(history + key).digest()


def history_keys(keys: Sequence[bytes], history: bytes = b"") -> list[bytes]:
    """Return, for each n from 0 to `len(keys)`, the digest of a history to which the first n messages are added."""
    return list(accumulate(keys, extend_history, initial=history))


def _plain_numbers(value: object) -> object:
    """Return decoded JSON with its numbers as JavaScript keeps them: harnesses in it write 1.0 as 1, and round."""
    if isinstance(value, dict):
        return {name: _plain_numbers(item) for name, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in cast("list[object]", value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if abs(value) < _EXACT and value == int(value) else float(value)
    return value


def _canonical_json(text: str) -> str:
    try:
        return msgspec.json.encode(_plain_numbers(msgspec.json.decode(text)), order="deterministic").decode()
    except (msgspec.DecodeError, RecursionError, OverflowError):
        return text
