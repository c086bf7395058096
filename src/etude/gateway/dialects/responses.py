"""OpenAI's Responses: requests in, answers, event streams and errors out. No response is kept for later requests."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import cast

import msgspec

from etude.gateway.dialects import chat
from etude.gateway.dialects.dialect import (
    NO_LOGPROBS,
    ONLY_TEXT,
    Dialect,
    HarnessRequest,
    ToolChoice,
    choice_rules,
    conversation_of,
    decode,
    joined_text,
    named_event,
    requested_of,
    require,
    signature_of,
    told_arguments,
    tool_calls_of,
)
from etude.gateway.dialects.pieces import Pieces
from etude.gateway.dialects.response_tools import Tool, known_as, named_tools, plain_tool
from etude.gateway.refusals import BAD_REQUEST, OVER, CallRefusedError, malformed
from etude.gateway.sessions import Answer

_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEMS = "messages, reasoning, and calls of tools with their results"
_COMPACTION = ("compaction", "compaction_trigger", "compaction_summary", "context_compaction")
NO_COMPACTION = (
    "no conversation is compacted here, have the harness summarise it by itself: Codex does if the name of its "
    "provider is not OpenAI"
)
_LATE_CODES = {429: "rate_limit_exceeded", 503: "server_error"}


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    encrypted_content: str | None = None


class _Item(msgspec.Struct, frozen=True):
    """Clients that write an item out again give all fields of its kind, most of them null."""

    type: str | None = None
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[_Part] | None = None
    tools: "list[Tool] | None" = None


class _Format(msgspec.Struct, frozen=True):
    type: str = "text"


class _Text(msgspec.Struct, frozen=True):
    format: _Format | None = None


class _Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: str | None = None
    summary: str | None = None


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a harness may ask for; it gets the session's sampling instead, and no more tokens than it asked for."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: _Reasoning | None = None
    parallel_tool_calls: bool | None = None


class _Body(msgspec.Struct, frozen=True):
    input: str | list[_Item] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    text: _Text | None = None
    include: list[str] | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    previous_response_id: str | None = None
    conversation: msgspec.Raw = msgspec.Raw(b"null")
    background: bool | None = None
    stream: bool | None = None


def parse_request(body: bytes) -> HarnessRequest:
    """Return what a body asks for; raise `CallRefusedError` (400) naming the first thing that is wrong."""
    asked = decode(body, _Body)
    sampling = decode(body, _Sampling)
    stateless = not asked.previous_response_id and bytes(asked.conversation) == b"null"
    text_format = asked.text.format if asked.text is not None else None
    tools, left_out = named_tools(_tools_of(asked))
    require(
        [
            (stateless, "previous_response_id: no response is kept, send the whole conversation as input"),
            (bytes(asked.prompt) == b"null", "prompt: none is kept, send its text as instructions and input"),
            (asked.input is not None, "input: is missing"),
            (not any("logprobs" in name for name in asked.include or ()), f"include: of logprobs, {NO_LOGPROBS}"),
            (not asked.background, "background: not possible, wait for the answer"),
            (text_format is None or text_format.type == "text", f"text.format: {ONLY_TEXT}"),
            *choice_rules(asked.tool_choice, tuple(tools)),
        ]
    )
    return HarnessRequest(
        conversation=conversation_of(_plain_messages(asked), [plain_tool(*named) for named in tools.items()]),
        model=(asked.model or "")[:256],
        stream=bool(asked.stream),
        requested=requested_of(sampling, left_out_tools=left_out),
        custom_tools=frozenset(name for name, (_, tool) in tools.items() if tool.type == "custom"),
        namespaces={name: namespace for name, (namespace, _) in tools.items() if namespace},
    )


def answer_body(answer: Answer, request: HarnessRequest) -> bytes:
    """Return the JSON of a response."""
    return msgspec.json.encode(_ended(answer, request))


def answer_events(answer: Answer, request: HarnessRequest) -> Iterator[bytes]:
    """Yield the events of a stream that tells a finished answer: created, item by item, completed."""
    numbered = _numbering()
    begun = _response(answer.call_id, request)
    yield numbered("response.created", response=begun)
    yield numbered("response.in_progress", response=begun)
    for index, item in enumerate(_output(answer, request)):
        empty, pieces = _in_pieces(item)
        yield numbered("response.output_item.added", output_index=index, item=empty)
        for kind, fields in pieces:
            yield numbered(kind, item_id=item["id"], output_index=index, **fields)
        yield numbered("response.output_item.done", output_index=index, item=item)
    ended = _ended(answer, request)
    yield numbered(f"response.{ended['status']}", response=ended)


def error_reply(refusal: CallRefusedError) -> tuple[int, dict[str, object]]:
    """Return status and envelope of an error; what is over is a 400, since Codex asks again after all others."""
    return BAD_REQUEST if refusal.status == OVER else refusal.status, chat.error_envelope(refusal)


def _late_error(refusal: CallRefusedError, request: HarnessRequest) -> bytes:
    """Return the stream of a response that failed."""
    numbered = _numbering()
    begun = _response("failed", request)
    error = {"code": _LATE_CODES.get(refusal.status, refusal.code), "message": refusal.message}
    failed = begun | {"status": "failed", "error": error}
    return numbered("response.created", response=begun) + numbered("response.failed", response=failed)


def _tools_of(asked: _Body) -> list[Tool]:
    """Return the tools of a request, those that its input tells as well."""
    items = asked.input if isinstance(asked.input, list) else []
    told = [tool for item in items if item.type == "additional_tools" for tool in item.tools or ()]
    return [*(asked.tools or ()), *told]


def _plain_messages(asked: _Body) -> list[dict[str, object]]:
    pieces = Pieces()
    if asked.instructions:
        pieces.say("system", asked.instructions)
    if isinstance(asked.input, str):
        pieces.say("user", asked.input)
        return pieces.messages
    for index, item in enumerate(asked.input or ()):
        _add_item(pieces, item, f"input[{index}]")
    return pieces.messages


def _add_item(pieces: Pieces, item: _Item, where: str) -> None:
    kind, call_id = item.type or "message", item.call_id or ""
    name = known_as(item.namespace or "", item.name or "")
    if kind == "message":
        _add_message(pieces, item, where)
    elif kind == "reasoning":
        content = item.content if isinstance(item.content, list) else []
        pieces.think("\n".join(part.text or "" for part in content))
    elif kind == "function_call":
        pieces.call(call_id, name, told_arguments(item.arguments))
    elif kind == "custom_tool_call":
        pieces.call(call_id, name, msgspec.json.encode({"input": item.input or ""}).decode())
    elif kind in ("function_call_output", "custom_tool_call_output"):
        pieces.report(call_id, joined_text(item.output, _TEXT_PARTS, where))
    elif kind == "agent_message":
        # Of one agent to another, whose words nobody encrypted here.
        content = item.content if isinstance(item.content, list) else []
        pieces.say("user", "".join(part.text or part.encrypted_content or "" for part in content))
    elif kind in _COMPACTION:
        raise malformed(f"{where}: {NO_COMPACTION}")
    elif kind != "additional_tools":
        raise malformed(f"{where}: an item of type {kind[:32]!r} is not supported: no response is kept, send {_ITEMS}")


def _add_message(pieces: Pieces, item: _Item, where: str) -> None:
    role, text = item.role or "", joined_text(item.content, _TEXT_PARTS, where)
    if role == "assistant":
        pieces.write(text)
    elif role in ("user", "system", "developer"):
        pieces.say("user" if role == "user" else "system", text)
    else:
        raise malformed(f"{where}: role {role[:32]!r} is none of user, assistant, system, developer")


def _response(call_id: str, request: HarnessRequest) -> dict[str, object]:
    """Return a response before its first token. `created_at` is 0: a replayed answer is the same, byte for byte."""
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": 0,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": (),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": (),
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _ended(answer: Answer, request: HarnessRequest) -> dict[str, object]:
    cut = answer.finish_reason == "length"
    return _response(answer.call_id, request) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, request),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _output(answer: Answer, request: HarnessRequest) -> list[dict[str, object]]:
    """Return the items of an answer; one that has neither text nor calls has an empty text, to be sent back."""
    message, calls = answer.message, tool_calls_of(answer)
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, object]] = []
    if message.get("reasoning_content"):
        items.append(
            {
                "id": f"rs_{answer.call_id}",
                "type": "reasoning",
                "summary": (),
                "content": [{"type": "reasoning_text", "text": message["reasoning_content"]}],
                "encrypted_content": signature_of(answer),
            }
        )
    if message.get("content") or not calls:
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": (), "logprobs": ()}
        head: dict[str, object] = {"id": f"msg_{answer.call_id}", "type": "message", "role": "assistant"}
        items.append(head | {"status": status, "content": [part]})
    for index, call in enumerate(calls):
        item_id = f"fc_{answer.call_id}_{index}"
        items.append({"id": item_id, "call_id": call["id"], "status": status} | _call(call, request))
    return items


def _call(call: dict[str, str], request: HarnessRequest) -> dict[str, object]:
    """Return a call in the form of its tool; one of a custom tool that is not well-formed is told as it is."""
    namespace = request.namespaces.get(call["name"])
    placed = {"name": call["name"]}
    if namespace is not None:
        placed = {"name": call["name"].removeprefix(known_as(namespace, "")), "namespace": namespace}
    if call["name"] in request.custom_tools:
        try:
            taken = msgspec.json.decode(call["arguments"], type=dict[str, str])
        except (msgspec.DecodeError, RecursionError):
            taken = {}
        if taken.keys() == {"input"}:
            return {"type": "custom_tool_call", **placed, "input": taken["input"]}
    return {"type": "function_call", **placed, "arguments": call["arguments"]}


def _in_pieces(item: dict[str, object]) -> tuple[dict[str, object], list[tuple[str, dict[str, object]]]]:
    """Return an item as it begins, and the events that fill it."""
    if item["type"] == "reasoning":
        text = cast("list[dict[str, object]]", item["content"])[0]["text"]
        place: dict[str, object] = {"content_index": 0}
        return item | {"content": (), "encrypted_content": None}, [
            ("response.reasoning_text.delta", {**place, "delta": text}),
            ("response.reasoning_text.done", {**place, "text": text}),
        ]
    if item["type"] == "message":
        part = cast("list[dict[str, object]]", item["content"])[0]
        place = {"content_index": 0}
        return item | {"content": (), "status": "in_progress"}, [
            ("response.content_part.added", {**place, "part": part | {"text": ""}}),
            ("response.output_text.delta", {**place, "delta": part["text"], "logprobs": ()}),
            ("response.output_text.done", {**place, "text": part["text"], "logprobs": ()}),
            ("response.content_part.done", {**place, "part": part}),
        ]
    field, kind = (
        ("arguments", "function_call_arguments")
        if item["type"] == "function_call"
        else ("input", "custom_tool_call_input")
    )
    return item | {field: "", "status": "in_progress"}, [
        (f"response.{kind}.delta", {"delta": item[field]}),
        (f"response.{kind}.done", {field: item[field]} | ({"name": item["name"]} if field == "arguments" else {})),
    ]


def _numbering() -> Callable[..., bytes]:
    """Return what makes the events of one stream, each with the next sequence number."""
    numbers = count()

    def event(kind: str, **fields: object) -> bytes:
        return named_event({"type": kind, "sequence_number": next(numbers), **fields})

    return event


RESPONSES = Dialect(
    path="/v1/responses",
    parse=parse_request,
    body=answer_body,
    events=answer_events,
    keep_alive=b": keep-alive\n\n",
    error=error_reply,
    late_error=_late_error,
)
