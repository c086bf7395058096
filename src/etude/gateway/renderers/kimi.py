"""Kimi-K2: one token per role, names of calls such as `functions.shell:0`, results in system turns.

Kimi-K2-Thinking begins each answer with its reasoning, be it empty. An answer without calls is a final one: it and all
before it lose their reasoning, so that a question after it starts a new branch. With `keep` they do not.
"""

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
from etude.gateway.renderers.family import Message, spaced_json
from etude.gateway.renderers.vocabulary import Frame

_ROLES = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM, _MIDDLE, _END = "<|im_system|>", "<|im_middle|>", "<|im_end|>"
_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_DEFAULT_SYSTEM = f"{_SYSTEM}system{_MIDDLE}You are Kimi, an AI assistant created by Moonshot AI.{_END}"
_THINK = ("<think>", "</think>")


class KimiFormat:
    """The format of Kimi-K2-Instruct, which writes no reasoning, or with `thinking` that of Kimi-K2-Thinking."""

    stops = (_END,)
    tokens: tuple[str, ...] = (*_ROLES.values(), _SYSTEM, _MIDDLE, _END, *_CALLS, *_CALL, _ARGUMENTS)
    after_answer = ""
    opens_reasoning = False

    def __init__(self, *, thinking: bool = False, keep: bool = False) -> None:
        self._thinking = thinking
        self._keep = keep or not thinking
        if thinking:
            self.tokens = (*self.tokens, *_THINK)

    def head(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], Sequence[Message]]:
        """Tool definitions come first, K2's with sorted keys; without a system message there is the family's."""
        pieces: list[str] = []
        if tools:
            dense = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            told = spaced_json(list(tools)) if self._thinking else dense
            pieces += [Frame(f"{_SYSTEM}tool_declare{_MIDDLE}"), told, Frame(_END)]
        if not messages or messages[0]["role"] != "system":
            pieces.append(Frame(_DEFAULT_SYSTEM + ("" if self._thinking else "\n")))
        return pieces, messages

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Final answers, and answers before the last of them, have no reasoning."""
        if self._keep:
            return messages
        final = max((place for place, _ in enumerate(messages) if _is_final(messages, place)), default=-1)
        return [
            {name: value for name, value in message.items() if name != "reasoning_content" or place > final}
            for place, message in enumerate(messages)
        ]

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
        """Reasoning, text, calls."""
        calls = calls_of(message)
        reasoning = str(message.get("reasoning_content") or "")
        thought = [Frame(_THINK[0]), reasoning, Frame(_THINK[1])] if self._thinking else []
        pieces: list[str] = [*thought, text_of(message)]
        for index, call in enumerate(calls):
            name = call.call_id or f"functions.{call.name}:{index}"
            pieces += [Frame(("" if index else _CALLS[0]) + _CALL[0]), name, Frame(_ARGUMENTS)]
            pieces += [call.arguments, Frame(_CALL[1])]
        return [*pieces, Frame(_CALLS[1])] if calls else pieces

    def extends(self, messages: Sequence[Message]) -> bool:
        """Whatever is no result of a tool follows a final answer."""
        return self._keep or (bool(messages) and messages[0]["role"] == "tool")

    def reader(self, text: str) -> list[Part]:
        """Read a section of calls."""
        return read_sections(text, _CALLS, _CALL, _read_call)


def _is_final(messages: Sequence[Message], place: int) -> bool:
    """Return whether a message is an answer without calls; one that results follow all the same is none."""
    if messages[place]["role"] != "assistant" or messages[place].get("tool_calls"):
        return False
    return place + 1 == len(messages) or messages[place + 1]["role"] != "tool"


def _read_call(text: str) -> Part:
    call_id, separated, arguments = text.partition(_ARGUMENTS)
    path, _, number = call_id.strip().rpartition(":")
    name = path.removeprefix("functions.")
    if not separated or not name or not number.isdecimal():
        raise MalformedCallError
    return Part(Kind.CALL, text, name, checked_arguments(arguments), call_id.strip())
