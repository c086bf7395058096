"""DeepSeek-V3: roles are single tokens, nothing ends a question, and results of tools lead straight into the answer.

`deepseek-v3` is the format of V3, V3-0324 and models made from them. Its template says nothing of the tools that there
are: a harness has to, in its system prompt. `deepseek-v3.1` is that of V3.1 without thinking, which does say it.

`deepseek-r1` and `deepseek-v3.1-thinking` begin the reasoning in the prompt. Their templates take it out of all earlier
answers, so that each call starts a new branch; with `keep` it stays. They know no reasoning after results of tools;
here it is begun there too.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import cast

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


def _token(words: str) -> str:
    """Return a token's spelling: fullwidth bars around it, and lower blocks for blanks."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


BEGIN, END, USER, ASSISTANT = map(_token, ("begin of sentence", "end of sentence", "User", "Assistant"))
_CALLS = (_token("tool calls begin"), _token("tool calls end"))
_CALL = (_token("tool call begin"), _token("tool call end"))
_OUTPUTS = (_token("tool outputs begin"), _token("tool outputs end"))
_OUTPUT = (_token("tool output begin"), _token("tool output end"))
_SEP = _token("tool sep")

_TOOLS_BEFORE = "## Tools\nYou have access to the following tools:\n"
_TOOLS_AFTER = (
    "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{_CALLS[0]}{_CALL[0]}tool_call_name{_SEP}tool_call_arguments{_CALL[1]}{{additional_tool_calls}}{_CALLS[1]}\n\n"
    "Where:\n\n- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces\n"
)


class DeepSeekFormat:
    """The format of DeepSeek-V3, or with `newer` that of V3.1; with `thinking` those of R1 and of V3.1 that thinks."""

    stops = (END,)
    after_answer = ""

    def __init__(self, *, newer: bool = False, thinking: bool = False, keep: bool = False) -> None:
        self.opens_reasoning = thinking
        self._newer = newer
        self._keep = keep or not thinking
        self._thought = ("<think>", "</think>") if newer else ("<think>\n", "\n</think>\n\n")
        outputs = () if newer else _OUTPUTS
        tags = [tag for tag, is_used in (("<think>", thinking), ("</think>", thinking or newer)) if is_used]
        self.tokens = (BEGIN, END, USER, ASSISTANT, _SEP, *_CALLS, *_CALL, *_OUTPUT, *outputs, *tags)

    def head(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], Sequence[Message]]:
        """Every system message stands at the beginning, without a role."""
        told: list[list[str]] = [[text_of(message)] for message in messages if message["role"] == "system"]
        if tools and self._newer:
            told = [*(told or [[""]]), _tools(tools)]
        pieces = [piece for text in told for piece in (Frame("\n\n"), *text)]
        return [Frame(BEGIN), *pieces[1:]], [message for message in messages if message["role"] != "system"]

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Earlier reasoning is gone, unless it is kept."""
        if self._keep:
            return messages
        return [{name: told for name, told in message.items() if name != "reasoning_content"} for message in messages]

    def incoming(self, messages: Sequence[Message]) -> list[str]:
        """Results that follow one another share a section."""
        pieces: list[str] = []
        for role, run in groupby(messages, lambda message: str(message["role"])):
            if role != "tool":
                pieces += [piece for message in run for piece in (Frame(USER), text_of(message))]
                continue
            results = [[Frame(_OUTPUT[0]), text_of(message), Frame(_OUTPUT[1])] for message in run]
            if self._newer:
                pieces += [piece for result in results for piece in result]
            else:
                lines = [piece for result in results for piece in (Frame("\n"), *result)]
                pieces += [Frame(_OUTPUTS[0]), *lines[1:], Frame(_OUTPUTS[1])]
        return pieces

    def opening(self, last: Message | None, answer: Message | None) -> list[str]:
        """After results of tools nothing opens an answer but its reasoning."""
        begins = self.opens_reasoning and (answer is None or bool(answer.get("reasoning_content")))
        if last is not None and last["role"] == "tool":
            return [Frame(self._thought[0])] if begins else []
        return [Frame(ASSISTANT + (self._thought[0] if begins else "</think>" if self._newer else ""))]

    def spoken(self, message: Message) -> list[str]:
        """Reasoning that the prompt began, text, calls."""
        calls = calls_of(message)
        reasoning = str(message.get("reasoning_content") or "") if self.opens_reasoning else ""
        pieces: list[str] = [*((reasoning, Frame(self._thought[1])) if reasoning else ()), text_of(message)]
        for index, call in enumerate(calls):
            pieces += [Frame(_CALLS[0] if index == 0 else "" if self._newer else "\n"), Frame(_CALL[0])]
            if self._newer:
                pieces += [call.name, Frame(_SEP), call.arguments, Frame(_CALL[1])]
            else:
                pieces += [Frame(f"function{_SEP}"), f"{call.name}\n```json\n{call.arguments}\n```", Frame(_CALL[1])]
        return [*pieces, Frame(_CALLS[1])] if calls else pieces

    def extends(self, messages: Sequence[Message]) -> bool:
        """System messages move to the beginning, and reasoning that is not kept goes."""
        return self._keep and all(message["role"] != "system" for message in messages)

    def reader(self, text: str) -> list[Part]:
        """Read a section of calls."""
        return read_sections(text, _CALLS, _CALL, _read_bare_call if self._newer else _read_fenced_call)


def _tools(tools: Sequence[Mapping[str, object]]) -> list[str]:
    pieces: list[str] = [Frame(_TOOLS_BEFORE)]
    for tool in tools:
        function = cast("Mapping[str, object]", tool["function"])
        description = str(function.get("description") or "")
        parameters = spaced_json(function.get("parameters") or {})
        pieces.append(f"\n### {function['name']}\nDescription: {description}\n\nParameters: {parameters}\n")
    return [*pieces, Frame(_TOOLS_AFTER)]


def _read_bare_call(text: str) -> Part:
    name, separated, arguments = text.partition(_SEP)
    if not separated or not name.strip():
        raise MalformedCallError
    return Part(Kind.CALL, text, name.strip(), checked_arguments(arguments))


def _read_fenced_call(text: str) -> Part:
    kind, separated, rest = text.partition(_SEP)
    name, fenced, body = rest.partition("\n```json\n")
    arguments, closed, after = body.rpartition("\n```")
    if kind.strip() != "function" or not (separated and fenced and closed and name.strip()) or after.strip():
        raise MalformedCallError
    return Part(Kind.CALL, text, name.strip(), checked_arguments(arguments))
