"""Kimi-K2: one token per role, names of calls such as `functions.shell:0`, results in system turns."""

import json
from collections.abc import Mapping, Sequence

from etude.gateway.renderers.answers import (
    Kind,
    MalformedCallError,
    Part,
    calls_of,
    checked_arguments,
    read_sections,
    text_of,
)
from etude.gateway.renderers.family import Message
from etude.gateway.renderers.vocabulary import Frame

_ROLES = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM, _MIDDLE, _END = "<|im_system|>", "<|im_middle|>", "<|im_end|>"
_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_DEFAULT_SYSTEM = f"{_SYSTEM}system{_MIDDLE}You are Kimi, an AI assistant created by Moonshot AI.{_END}\n"


class KimiFormat:
    """The format of Kimi-K2-Instruct; it writes no reasoning."""

    stops = (_END,)
    tokens = (*_ROLES.values(), _SYSTEM, _MIDDLE, _END, *_CALLS, *_CALL, _ARGUMENTS)
    after_answer = ""
    opens_reasoning = False

    def head(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], Sequence[Message]]:
        """Tool definitions come first, their keys sorted; a conversation without a system message gets the family's."""
        pieces: list[str] = []
        if tools:
            told = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            pieces += [Frame(f"{_SYSTEM}tool_declare{_MIDDLE}"), told, Frame(_END)]
        if not messages or messages[0]["role"] != "system":
            pieces.append(Frame(_DEFAULT_SYSTEM))
        return pieces, messages

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Every turn sees all."""
        return messages

    def incoming(self, messages: Sequence[Message]) -> list[str]:
        """A result repeats the name that the policy gave to its call."""
        pieces: list[str] = []
        for message in messages:
            role = str(message["role"])
            pieces += [Frame(_ROLES.get(role, _SYSTEM)), str(message.get("name") or role), Frame(_MIDDLE)]
            if role == "tool":
                pieces += [Frame("## Return of "), str(message.get("tool_call_id") or ""), Frame("\n")]
            pieces += [text_of(message), Frame(_END)]
        return pieces

    def opening(self, last: Message | None, answer: Message | None) -> list[str]:
        """The same for every answer."""
        del last, answer
        return [Frame(f"{_ROLES['assistant']}assistant{_MIDDLE}")]

    def spoken(self, message: Message) -> list[str]:
        """Text and calls."""
        calls = calls_of(message)
        pieces: list[str] = [text_of(message)]
        for index, call in enumerate(calls):
            name = call.call_id or f"functions.{call.name}:{index}"
            pieces += [Frame(("" if index else _CALLS[0]) + _CALL[0]), name, Frame(_ARGUMENTS)]
            pieces += [call.arguments, Frame(_CALL[1])]
        return [*pieces, Frame(_CALLS[1])] if calls else pieces

    def extends(self, messages: Sequence[Message]) -> bool:
        """Always."""
        del messages
        return True

    def reader(self, text: str) -> list[Part]:
        """Read a section of calls."""
        return read_sections(text, _CALLS, _CALL, _read_call)


def _read_call(text: str) -> Part:
    call_id, separated, arguments = text.partition(_ARGUMENTS)
    path, _, number = call_id.strip().rpartition(":")
    name = path.removeprefix("functions.")
    if not separated or not name or not number.isdecimal():
        raise MalformedCallError
    return Part(Kind.CALL, text, name, checked_arguments(arguments), call_id.strip())
