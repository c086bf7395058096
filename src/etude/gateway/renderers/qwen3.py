"""Qwen3: ChatML with reasoning. Results of tools are one user turn; a later question drops earlier reasoning.

Hence an answer is continued token by token through a loop of tool calls, while a message of a user starts a new branch.
With `keep` reasoning stays where it was and every conversation is one branch: for harnesses that say everything as a
user. A policy trained so must be served with a template that keeps reasoning too.

With thinking switched off each prompt ends behind an empty reasoning, which the models' template takes away once the
answer is an earlier one. Here it stays, for the same reason.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from etude.gateway.renderers.answers import calls_of, read_tags, text_of
from etude.gateway.renderers.chatml import TOOLS_AFTER, TOOLS_BEFORE, TURN_END, TURN_START
from etude.gateway.renderers.family import Message, spaced_json
from etude.gateway.renderers.vocabulary import Frame


class Qwen3Format:
    """The format of Qwen3; with `opens_reasoning` that of Qwen3-Thinking, whose prompts begin the reasoning.

    With `closes_reasoning` prompts begin and end it, and every conversation is one branch.
    """

    stops = (TURN_END,)
    tokens = (TURN_START, TURN_END, "<think>", "</think>", "<tool_call>", "</tool_call>")
    after_answer = "\n"

    def __init__(self, *, opens_reasoning: bool = False, closes_reasoning: bool = False, keep: bool = False) -> None:
        self.opens_reasoning = opens_reasoning
        self.reader = read_tags
        self._closes_reasoning = closes_reasoning
        self._keep = keep or closes_reasoning

    def head(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], Sequence[Message]]:
        """Tool definitions stand in the system turn, after its text."""
        system = bool(messages) and messages[0]["role"] == "system"
        if not system and not tools:
            return [], messages
        pieces: list[str] = [Frame(f"{TURN_START}system\n")]
        if system:
            pieces += [text_of(messages[0]), *([Frame("\n\n")] if tools else [])]
        if tools:
            told = [piece for tool in tools for piece in (Frame("\n"), spaced_json(tool))]
            pieces += [Frame(TOOLS_BEFORE), *told, Frame(TOOLS_AFTER)]
        return [*pieces, Frame(f"{TURN_END}\n")], messages[system:]

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Answers before the last message of a user have no reasoning."""
        if self._keep:
            return messages
        asked = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return [
            {name: value for name, value in message.items() if name != "reasoning_content" or place > asked}
            for place, message in enumerate(messages)
        ]

    def incoming(self, messages: Sequence[Message]) -> list[str]:
        """Results that follow one another share a turn."""
        pieces: list[str] = []
        for role, run in groupby(messages, lambda message: str(message["role"])):
            if role == "tool":
                pieces.append(Frame(f"{TURN_START}user"))
                for message in run:
                    pieces += [Frame("\n<tool_response>\n"), text_of(message), Frame("\n</tool_response>")]
                pieces.append(Frame(f"{TURN_END}\n"))
                continue
            for message in run:
                pieces += [Frame(f"{TURN_START}{role}\n"), text_of(message), Frame(f"{TURN_END}\n")]
        return pieces

    def opening(self, last: Message | None, answer: Message | None) -> list[str]:
        """An answer that has no reasoning to be seen had none begun."""
        del last
        if self._closes_reasoning:
            return [Frame(f"{TURN_START}assistant\n<think>\n\n</think>\n\n")]
        begins = self.opens_reasoning and (answer is None or bool(answer.get("reasoning_content")))
        return [Frame(f"{TURN_START}assistant\n" + ("<think>\n" if begins else ""))]

    def spoken(self, message: Message) -> list[str]:
        """Reasoning, text, calls."""
        pieces: list[str] = []
        if reasoning := str(message.get("reasoning_content") or ""):
            pieces += [Frame("" if self.opens_reasoning else "<think>\n"), reasoning, Frame("\n</think>\n\n")]
        text = text_of(message)
        pieces.append(text)
        for index, call in enumerate(calls_of(message)):
            name = msgspec.json.encode(call.name).decode()
            pieces += [
                Frame(("\n" if text or index else "") + "<tool_call>\n"),
                f'{{"name": {name}, "arguments": {call.arguments}}}',
                Frame("\n</tool_call>"),
            ]
        return pieces

    def extends(self, messages: Sequence[Message]) -> bool:
        """A user's message drops earlier reasoning."""
        return self._keep or all(message["role"] != "user" for message in messages)
