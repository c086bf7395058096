"""What a policy wrote, as an OpenAI assistant message: text, reasoning and tool calls."""

import re
from collections.abc import Mapping

import msgspec

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw


def parse_answer(text: str) -> dict[str, object]:
    """Return an assistant message: `content`, and `reasoning_content` and `tool_calls` where there are any.

    Arguments are the very characters that the policy wrote. An answer with one malformed tool call has none at all:
    it is given back as plain text, as it stands, with `tool_parse_error` set to True. Nothing is repaired.
    """
    message: dict[str, object] = {"role": "assistant"}
    reasoning, rest = _split_reasoning(text)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    blocks = list(_CALL.finditer(rest))
    calls = [_parse_call(block) for block in blocks]
    if None in calls or "</tool_call>" in _CALL.sub("", rest):
        return message | {"content": rest, "tool_parse_error": True}
    if not calls:
        return message | {"content": rest}
    return message | {"content": _CALL.sub("", rest).strip() or None, "tool_calls": calls}


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Return what is inside a leading `<think>` block, if there is one, and what follows it."""
    if not text.lstrip().startswith(_THINK_OPEN):
        return None, text
    reasoning, _, rest = text.lstrip()[len(_THINK_OPEN) :].partition(_THINK_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _parse_call(block: re.Match[str]) -> Mapping[str, object] | None:
    if not block[0].endswith("</tool_call>"):
        return None
    try:
        call = msgspec.json.decode(block[1].strip(), type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(call.arguments).decode()
    if not call.name or not arguments.startswith("{"):
        return None
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}
