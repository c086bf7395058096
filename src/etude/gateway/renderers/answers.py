"""What a policy wrote, as parts that add up to every character of it, and as an OpenAI assistant message.

Each family has its own spelling of tool calls, read by a `Reader`. No reader repairs anything: an answer with one
malformed call has none at all, its text is given back as it stands, and `tool_parse_error` says so.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import cast

import msgspec


class Kind(StrEnum):
    """What a part of an answer is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    MARKER = "marker"
    """Belongs to the format: tags, and the white space around them."""


class Part(msgspec.Struct, frozen=True):
    """A stretch of an answer; `name`, `arguments` and `call_id` are told of calls alone."""

    kind: Kind
    text: str
    name: str = ""
    arguments: str = ""
    """The very characters that the policy wrote."""
    call_id: str = ""
    """The policy's own name of the call, where the family has such."""


class MalformedCallError(ValueError):
    """A tool call that was begun but cannot be read."""


Reader = Callable[[str], "list[Part]"]
"""Splits text without reasoning into parts; raises `MalformedCallError`."""


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw


class _LlamaCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    parameters: msgspec.Raw


def parts_of(text: str, reader: Reader, *, opened: bool = False) -> tuple[list[Part], bool]:
    """Return an answer in parts, and whether a tool call in it was malformed.

    `opened` says that the prompt ended inside of the reasoning.
    """
    thought, rest = _split_reasoning(text, opened=opened)
    try:
        return thought + _tidy(reader(rest)), False
    except MalformedCallError:
        return [*thought, *_part(Kind.TEXT, rest)], True


def message_of(parts: Sequence[Part], *, malformed: bool) -> dict[str, object]:
    """Return parts as an assistant message: `content`, and `reasoning_content` and `tool_calls` where there are any."""
    message: dict[str, object] = {"role": "assistant"}
    if any(part.kind is Kind.REASONING for part in parts):
        message["reasoning_content"] = "".join(part.text for part in parts if part.kind is Kind.REASONING)
    calls = [_call_message(part) for part in parts if part.kind is Kind.CALL]
    text = "".join(part.text for part in parts if part.kind is Kind.TEXT)
    message["content"] = (text or None) if calls else text
    if calls:
        message["tool_calls"] = calls
    return message | {"tool_parse_error": True} if malformed else message


def read_tags(text: str) -> list[Part]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes write it."""
    parts: list[Part] = []
    for outside, inside in _blocks(text, "<tool_call>", "</tool_call>"):
        parts += _part(Kind.TEXT, outside)
        if inside is not None:
            name, arguments = _named(inside, _Call)
            parts += [
                Part(Kind.MARKER, "<tool_call>"),
                Part(Kind.CALL, inside, name, arguments),
                Part(Kind.MARKER, "</tool_call>"),
            ]
    return parts


def read_sections(
    text: str, section: tuple[str, str], call: tuple[str, str], read: Callable[[str], Part]
) -> list[Part]:
    """Read calls between two tokens each, all of them inside of one section that ends the answer."""
    before, begun, rest = text.partition(section[0])
    if not begun:
        if any(token in text for token in (*section, *call)):
            raise MalformedCallError
        return _part(Kind.TEXT, text)
    parts = [*_part(Kind.TEXT, before), Part(Kind.MARKER, begun)]
    inner, ended, after = rest.partition(section[1])
    if not ended or after.strip() or any(token in before for token in (section[1], *call)):
        raise MalformedCallError
    for outside, inside in _blocks(inner, *call):
        if outside.strip():
            raise MalformedCallError
        parts += _part(Kind.MARKER, outside)
        if inside is not None:
            parts += [Part(Kind.MARKER, call[0]), read(inside), Part(Kind.MARKER, call[1])]
    if not any(part.kind is Kind.CALL for part in parts):
        raise MalformedCallError
    return [*parts, Part(Kind.MARKER, ended), *_part(Kind.MARKER, after)]


def read_bare_json(text: str) -> list[Part]:
    """Read an answer that is nothing but `{"name": ..., "parameters": {...}}`, as Llama writes it.

    Several calls are separated by `;`. Other JSON objects are text.
    """
    tagged = text.startswith("<|python_tag|>")
    body = text.removeprefix("<|python_tag|>")
    if not tagged and not re.match(r'\s*\{\s*"name"\s*:', body):
        return _part(Kind.TEXT, text)
    parts = [Part(Kind.MARKER, "<|python_tag|>")] if tagged else []
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        gap = re.compile(r"\s*;?\s*" if place else r"\s*").match(body, place)
        start = gap.end() if gap else place
        parts += _part(Kind.MARKER, body[place:start])
        if start == len(body):
            break
        try:
            _, end = decoder.raw_decode(body, start)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError from error
        name, arguments = _named(body[start:end], _LlamaCall)
        parts.append(Part(Kind.CALL, body[start:end], name, arguments))
        place = end
    return parts


def checked_arguments(text: str) -> str:
    """Return arguments without white space around them; raise `MalformedCallError` unless they are a JSON object."""
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedCallError from error
    return text.strip()


def calls_of(message: Mapping[str, object]) -> list[Part]:
    """Return the tool calls of an assistant message."""
    told = cast("Sequence[Mapping[str, object]]", message.get("tool_calls") or ())
    return [_call_part(call) for call in told]


def text_of(message: Mapping[str, object]) -> str:
    """Return a message's content, empty when it has none."""
    return str(message.get("content") or "")


def _call_part(call: Mapping[str, object]) -> Part:
    function = cast("Mapping[str, str]", call["function"])
    return Part(Kind.CALL, "", function["name"], function["arguments"], str(call.get("id") or ""))


def _call_message(part: Part) -> dict[str, object]:
    call: dict[str, object] = {"type": "function", "function": {"name": part.name, "arguments": part.arguments}}
    return {"id": part.call_id, **call} if part.call_id else call


def _split_reasoning(text: str, *, opened: bool) -> tuple[list[Part], str]:
    """Return the parts of a leading `<think>` block, if there is one, and what follows it."""
    opening = re.match(r"\n*" if opened else r"\s*<think>\n*", text)
    if opening is None:
        return [], text
    reasoning, closed, rest = text[opening.end() :].partition("</think>")
    inner = reasoning.rstrip("\n")
    after = rest.lstrip("\n")
    marker = reasoning[len(inner) :] + closed + rest[: len(rest) - len(after)]
    parts = [*_part(Kind.MARKER, opening[0]), Part(Kind.REASONING, inner), *_part(Kind.MARKER, marker)]
    return parts, after


def _tidy(parts: list[Part]) -> list[Part]:
    """Return parts in which the white space at both ends of the text around calls belongs to the format."""
    if not any(part.kind is Kind.CALL for part in parts):
        return parts
    tidied = list(_trimmed(parts, str.lstrip))
    return list(_trimmed(tidied[::-1], str.rstrip))[::-1]


def _trimmed(parts: Sequence[Part], trim: Callable[[str], str]) -> Iterator[Part]:
    """Yield parts; blank ones become markers until the first that is not, which is trimmed at that end."""
    trimming = True
    for part in parts:
        if part.kind is not Kind.TEXT or not trimming:
            yield part
            continue
        kept = trim(part.text)
        trimming = not kept
        cut = len(part.text) - len(kept)
        ends = (part.text[:cut], kept) if trim is str.lstrip else (part.text[len(kept) :], kept)
        yield from _part(Kind.MARKER, ends[0])
        yield from _part(Kind.TEXT, ends[1])


def _blocks(text: str, begin: str, end: str) -> Iterator[tuple[str, str | None]]:
    """Yield what is outside of blocks and what is inside of the next one, None after the last."""
    while begin in text:
        outside, _, rest = text.partition(begin)
        inside, ended, text = rest.partition(end)
        if not ended or end in outside:
            raise MalformedCallError
        yield outside, inside
    if end in text:
        raise MalformedCallError
    yield text, None


def _named(text: str, kind: type[_Call] | type[_LlamaCall]) -> tuple[str, str]:
    try:
        call = msgspec.json.decode(text.strip(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedCallError from error
    arguments = bytes(call.arguments if isinstance(call, _Call) else call.parameters).decode()
    if not call.name or not arguments.startswith("{"):
        raise MalformedCallError
    return call.name, arguments


def _part(kind: Kind, text: str) -> list[Part]:
    return [Part(kind, text)] if text else []
