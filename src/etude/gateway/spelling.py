"""Tool calls as a session drew them, whatever a harness makes of them and a policy calls them."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from etude.gateway.conversation import Conversation

_TRIMMED = re.compile(r"[\s\\]+")


class OwnCalls:
    """The tool calls that a session drew, by ids of their own.

    Harnesses change what was drawn before they run it, and keep what they ran. A call is found by its id and put back
    as it was drawn if it is the same call, tidied: parameters added with their defaults, numbers and booleans made of
    strings, white space and backslashes taken away, another case of the name. A call that says anything else was
    rewritten, and stays as it is.

    Policies that name their calls use a name again in a later answer, or twice in one, and harnesses take the second
    call for the first. They get ids of ours, and the policy is told its own names.
    """

    def __init__(self) -> None:
        self._drawn: dict[str, Mapping[str, str]] = {}
        self._names: dict[str, str] = {}

    def issue(self, calls: Sequence[Mapping[str, object]], call_id: str) -> list[dict[str, object]]:
        """Return the calls of an answer with their ids, and remember them."""
        issued: list[dict[str, object]] = []
        for index, call in enumerate(calls):
            issued.append({**call, "id": f"call_{call_id}_{index}"})
            self._drawn[f"call_{call_id}_{index}"] = _function(call)
            if name := str(call.get("id") or ""):
                self._names[f"call_{call_id}_{index}"] = name
        return issued

    def named(self, messages: Sequence[dict[str, object]]) -> Sequence[dict[str, object]]:
        """Return messages in which calls have the names that the policy gave them."""
        return [self._renamed(message) for message in messages] if self._names else messages

    def restore(self, conversation: Conversation) -> Conversation:
        """Return a conversation whose tidied calls are as they were drawn."""
        messages = tuple(self._restored(message) for message in conversation.messages)
        return msgspec.structs.replace(conversation, messages=messages)

    def _renamed(self, message: dict[str, object]) -> dict[str, object]:
        if calls := _calls(message):
            renamed = [{**call, "id": self._names.get(str(call["id"]), call["id"])} for call in calls]
            return message | {"tool_calls": renamed}
        name = self._names.get(str(message.get("tool_call_id") or ""))
        return message | {"tool_call_id": name} if name else message

    def _restored(self, message: dict[str, object]) -> dict[str, object]:
        calls = _calls(message)
        if not calls:
            return message
        own: list[dict[str, object]] = [{**call, "function": self._own(call)} for call in calls]
        return message if own == calls else message | {"tool_calls": own}

    def _own(self, call: Mapping[str, object]) -> Mapping[str, str]:
        told = _function(call)
        drawn = self._drawn.get(str(call["id"]))
        return told if drawn is None or not _is_tidied(drawn, told) else drawn


def respelled(told: dict[str, object], known: dict[str, object] | None) -> dict[str, object]:
    """Return an answer as it was drawn; its calls keep their ids, since another answer may have made the same ones."""
    if known is None or not _calls(known):
        return known or told
    pairs = zip(_calls(known), _calls(told), strict=True)
    return known | {"tool_calls": [{**drawn, "id": call["id"]} for drawn, call in pairs]}


def _is_tidied(drawn: Mapping[str, str], told: Mapping[str, str]) -> bool:
    if drawn["name"].lower() != told["name"].lower():
        return False
    try:
        ours, theirs = (msgspec.json.decode(call["arguments"], type=dict[str, object]) for call in (drawn, told))
        return _reads_as(ours, theirs)
    except (msgspec.DecodeError, RecursionError):
        return False


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
