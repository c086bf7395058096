"""Llama 3.1 to 3.3: headers around roles, a call is an answer of bare JSON, a result is a quoted string.

The prompt says that today is 26 July 2024, as the family's template does unless it is told another date: a prompt that
changes at midnight would be another prompt.
"""

import json
from collections.abc import Mapping, Sequence

import msgspec

from etude.gateway.renderers.answers import calls_of, read_bare_json, text_of
from etude.gateway.renderers.family import Message, spaced_json
from etude.gateway.renderers.vocabulary import Frame

BEGIN, _HEADER, _HEADER_END = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
_END, _END_OF_MESSAGE, _END_OF_TEXT = "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"
_ROLES = {"tool": "ipython"}

_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_TOOLS_IN_USER = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt.\n\n"
)
_TOOLS_IN_SYSTEM = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
)
_TOOLS_FORMAT = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


class LlamaFormat:
    """The format of Llama 3.1 to 3.3; it writes no reasoning, and text or calls, never both."""

    stops = (_END, _END_OF_MESSAGE, _END_OF_TEXT)
    tokens = (BEGIN, _HEADER, _HEADER_END, *stops)
    after_answer = ""
    opens_reasoning = False

    def __init__(self) -> None:
        self.reader = read_bare_json

    def head(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], Sequence[Message]]:
        """Tool definitions stand in the first question, or in the system turn when a conversation begins otherwise."""
        system = text_of(messages[0]).strip() if messages and messages[0]["role"] == "system" else ""
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        asked = bool(rest) and rest[0]["role"] == "user"
        listed = [f"{json.dumps(tool, ensure_ascii=False, indent=4)}\n\n" for tool in tools]
        pieces: list[str] = [Frame(BEGIN), _header("system")]
        pieces += [Frame("Environment: ipython\n" if tools else ""), Frame(_DATES)]
        if tools and not asked:
            pieces += [Frame(_TOOLS_IN_SYSTEM + _TOOLS_FORMAT), *listed]
        pieces += [system, Frame(_END)]
        if tools and asked:
            question = text_of(rest[0]).strip()
            pieces += [_header("user"), Frame(_TOOLS_IN_USER + _TOOLS_FORMAT), *listed, question, Frame(_END)]
            rest = rest[1:]
        return pieces, rest

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Every turn sees all."""
        return messages

    def incoming(self, messages: Sequence[Message]) -> list[str]:
        """Questions are trimmed, results are JSON strings."""
        pieces: list[str] = []
        for message in messages:
            role, text = str(message["role"]), text_of(message)
            content = spaced_json(text) if role == "tool" else text.strip()
            pieces += [_header(_ROLES.get(role, role)), content, Frame(_END)]
        return pieces

    def opening(self, last: Message | None, answer: Message | None) -> list[str]:
        """The same for every answer."""
        del last, answer
        return [_header("assistant")]

    def spoken(self, message: Message) -> list[str]:
        """Calls without the text beside them; `;` separates several, of which the family's template knows nothing."""
        calls = calls_of(message)
        if not calls:
            return [text_of(message).strip()]
        spelled = [
            f'{{"name": {msgspec.json.encode(call.name).decode()}, "parameters": {call.arguments}}}' for call in calls
        ]
        return ["; ".join(spelled)]

    def extends(self, messages: Sequence[Message]) -> bool:
        """Always."""
        del messages
        return True


def _header(role: str) -> Frame:
    return Frame(f"{_HEADER}{role}{_HEADER_END}\n\n")
