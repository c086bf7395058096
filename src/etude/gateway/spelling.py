"""Tool calls that come back tidied: harnesses change what was drawn before they run it, and keep what they ran."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from etude.gateway.conversation import Conversation

_TRIMMED = re.compile(r"[\s\\]+")


class OwnCalls:
    """The tool calls that a session drew, by their ids.

    A call is found by its id and put back as it was drawn if it is the same call, tidied: parameters added with their
    defaults, numbers and booleans made of strings, white space and backslashes taken away. A call that says anything
    else was rewritten, and stays as it is. Where policies name their calls themselves, several may have one id.
    """

    def __init__(self) -> None:
        self._drawn: dict[str, list[Mapping[str, str]]] = {}

    def learn(self, answer: Mapping[str, object]) -> None:
        """Remember the calls of an answer."""
        for call in _calls(answer):
            self._drawn.setdefault(str(call["id"]), []).append(_function(call))

    def restore(self, conversation: Conversation) -> Conversation:
        """Return a conversation whose tidied calls are as they were drawn."""
        messages = tuple(self._restored(message) for message in conversation.messages)
        return msgspec.structs.replace(conversation, messages=messages)

    def _restored(self, message: dict[str, object]) -> dict[str, object]:
        calls = _calls(message)
        if not calls:
            return message
        own: list[dict[str, object]] = [{**call, "function": self._own(call)} for call in calls]
        return message if own == calls else message | {"tool_calls": own}

    def _own(self, call: Mapping[str, object]) -> Mapping[str, str]:
        told = _function(call)
        drawn = self._drawn.get(str(call["id"]), ())
        if told in drawn:
            return told
        kept = [(count, index) for index, one in enumerate(drawn) if (count := _num_kept(one, told)) is not None]
        return drawn[max(kept)[1]] if kept else told


def _num_kept(drawn: Mapping[str, str], told: Mapping[str, str]) -> int | None:
    """Return how many parameters were drawn if the call is the same, tidied, and else None."""
    if drawn["name"] != told["name"]:
        return None
    try:
        ours, theirs = (msgspec.json.decode(call["arguments"], type=dict[str, object]) for call in (drawn, told))
        return len(ours) if _reads_as(ours, theirs) else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _reads_as(drawn: object, told: object) -> bool:
    """Return whether two values of JSON read the same; objects may have gained properties."""
    if isinstance(drawn, dict) and isinstance(told, dict):
        ours, theirs = cast("dict[str, object]", drawn), cast("dict[str, object]", told)
        return all(name in theirs and _reads_as(value, theirs[name]) for name, value in ours.items())
    if isinstance(drawn, list) and isinstance(told, list):
        one, other = cast("list[object]", drawn), cast("list[object]", told)
        return len(one) == len(other) and all(map(_reads_as, one, other))
    return _text(cast("object", drawn)) == _text(told)


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return _TRIMMED.sub("", text)


def _calls(message: Mapping[str, object]) -> Sequence[dict[str, object]]:
    return cast("Sequence[dict[str, object]]", message.get("tool_calls") or ())


def _function(call: Mapping[str, object]) -> Mapping[str, str]:
    return cast("Mapping[str, str]", call["function"])
