"""Anthropic's Messages: requests in, answers, event streams and errors out."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, cast

import msgspec

from etude.gateway.conversation import Conversation
from etude.gateway.dialects.dialect import (
    NO_PREFILL,
    ONLY_TEXT,
    Dialect,
    HarnessRequest,
    ToolChoice,
    choice_rules,
    conversation_of,
    decode,
    function_tool,
    named_event,
    only_text,
    requested_of,
    require,
    signature_of,
    told_arguments,
    tool_calls_of,
)
from etude.gateway.dialects.pieces import Pieces
from etude.gateway.refusals import CallRefusedError, malformed
from etude.gateway.sessions import Answer

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    529: "overloaded_error",
}
_UNDEFINED = ("bash_", "text_editor_", "computer_", "memory_", "function")
"""Types of tools that a harness runs, of which only the provider's models know what they take unless it says so."""
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class _Block(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[_Block] | None" = None


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Block] | None


class _Tool(msgspec.Struct, frozen=True):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None


class _Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    budget_tokens: int | None = None


class _OutputConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: str | None = None
    format: msgspec.Raw = msgspec.Raw(b"null")


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a harness may ask for; it gets the session's sampling instead, and no more tokens than it asked for."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None


class _Body(msgspec.Struct, frozen=True):
    messages: list[_Message]
    model: str | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: msgspec.Raw = msgspec.Raw(b"null")
    thread: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None


def parse_request(body: bytes) -> HarnessRequest:
    """Return what a body asks for; raise `CallRefusedError` (400) naming the first thing that is wrong."""
    asked = decode(body, _Body)
    sampling = decode(body, _Sampling)
    offered, left_out = _sorted_tools(asked)
    if bytes(asked.thread) != b"null":
        # The SDK's tool runner knows this code, and then sends the whole conversation as everybody else does.
        message = "thread: no conversation is kept, send all of its messages"
        raise CallRefusedError(400, "thread_unsupported_request", message)
    choice, output = asked.tool_choice or ToolChoice(), asked.output_config or _OutputConfig()
    formats = (bytes(output.format), bytes(asked.output_format))
    require(
        [
            *choice_rules(choice, offered),
            (formats == (b"null", b"null"), f"output_config.format: {ONLY_TEXT}"),
            (bool(asked.messages) and asked.messages[-1].role != "assistant", f"messages: {NO_PREFILL}"),
        ]
    )
    return HarnessRequest(
        conversation=conversation_of(_plain_messages(asked), offered),
        model=(asked.model or "")[:256],
        stream=bool(asked.stream),
        requested=requested_of(
            sampling, effort=output.effort, no_parallel_calls=choice.disable_parallel_tool_use, left_out_tools=left_out
        ),
    )


def parse_count(body: bytes) -> Conversation:
    """Return the conversation whose tokens are to be counted; raise `CallRefusedError` (400)."""
    asked = decode(body, _Body)
    return conversation_of(_plain_messages(asked), _sorted_tools(asked)[0])


def answer_body(answer: Answer, request: HarnessRequest) -> bytes:
    """Return the JSON of a message. Arguments of tools are the very JSON that the policy wrote."""
    return msgspec.json.encode(
        _message(answer, request)
        | {
            "content": _content(answer),
            "stop_reason": _STOP_REASONS[answer.finish_reason],
            "usage": _usage(answer, answer.completion_tokens),
        }
    )


def answer_events(answer: Answer, request: HarnessRequest) -> Iterator[bytes]:
    """Yield the events of a stream that tells a finished answer: start, block by block, end."""
    yield named_event({"type": "message_start", "message": _message(answer, request)})
    for index, block in enumerate(_content(answer)):
        begin, deltas = _in_pieces(block)
        yield named_event({"type": "content_block_start", "index": index, "content_block": begin})
        for delta in deltas:
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}
    yield named_event({"type": "message_delta", "delta": delta, "usage": _usage(answer, answer.completion_tokens)})
    yield named_event({"type": "message_stop"})


def error_reply(refusal: CallRefusedError) -> tuple[int, dict[str, object]]:
    """Return status and envelope of an error; a model that cannot answer now is 529, overloaded."""
    status = 529 if refusal.retry_after_s is not None else refusal.status
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    error = {"type": kind, "message": refusal.message, "details": {"error_code": refusal.code}}
    return status, {"type": "error", "error": error}


def _late_error(refusal: CallRefusedError, _: HarnessRequest) -> bytes:
    return named_event(error_reply(refusal)[1])


def _sorted_tools(asked: _Body) -> tuple[list[dict[str, object]], list[str]]:
    """Return the tools that the harness runs, and the types of those that only the provider could run."""
    offered: list[dict[str, object]] = []
    left_out: list[str] = []
    for index, tool in enumerate(asked.tools or ()):
        kind = tool.type or "custom"
        if kind == "custom" or tool.input_schema is not None:
            function = function_tool(name=tool.name or "", description=tool.description, parameters=tool.input_schema)
            offered.append(function)
        elif kind.startswith(_UNDEFINED):
            message = f"what a tool of type {kind[:32]!r} takes is not known here, give it an input_schema"
            raise malformed(f"tools[{index}]: {message}")
        else:
            left_out.append(kind)
    return offered, left_out


def _plain_messages(asked: _Body) -> list[dict[str, object]]:
    pieces = Pieces()
    if asked.system:
        pieces.say("system", _texts(asked.system, "system"))
    for index, message in enumerate(asked.messages):
        where = f"messages[{index}]"
        content = "" if message.content is None else message.content
        if message.role == "assistant":
            _add_answer(pieces, content, where)
        elif message.role == "user" and not isinstance(content, str):
            _add_user_blocks(pieces, content, where)
        else:
            pieces.say("user" if message.role == "user" else "system", _texts(content, where))
    return pieces.messages


def _add_answer(pieces: Pieces, content: str | list[_Block], where: str) -> None:
    pieces.begin_answer()
    if isinstance(content, str):
        pieces.write(content)
        return
    for kind, run in groupby(content, lambda block: block.type):
        blocks = list(run)
        if kind == "thinking":
            pieces.think("\n".join(block.thinking or "" for block in blocks))
        elif kind == "text":
            pieces.write(_texts(blocks, where))
        elif kind == "tool_use":
            for block in blocks:
                pieces.call(block.id or "", block.name or "", _arguments(block, where))
        elif kind != "redacted_thinking":
            raise only_text(kind, where)


def _add_user_blocks(pieces: Pieces, blocks: Sequence[_Block], where: str) -> None:
    """Add a user's message: results of tools become messages of their own, in their place."""
    if not blocks:
        pieces.say("user", "")
    for kind, run in groupby(blocks, lambda block: block.type):
        if kind == "tool_result":
            for block in run:
                pieces.report(block.tool_use_id or "", _texts(block.content or "", where))
        else:
            pieces.say("user", _texts(list(run), where))


def _texts(content: str | list[_Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type not in ("text", "tool_reference"):
            raise only_text(block.type, where)
    # A reference says which tool a search found; the policy is shown all of them from the beginning.
    return "\n".join(block.text or block.tool_name or "" for block in content)


def _arguments(block: _Block, where: str) -> str:
    arguments = told_arguments(bytes(block.input).decode())
    if not arguments.startswith("{"):
        raise malformed(f"{where}: the input of a tool_use is an object")
    return arguments


def _message(answer: Answer, request: HarnessRequest) -> dict[str, object]:
    """Return a message before its first token."""
    return {
        "id": f"msg_{answer.call_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": (),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, 0),
    }


def _content(answer: Answer) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    message = answer.message
    if message.get("reasoning_content"):
        reasoning = message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature_of(answer)})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in tool_calls_of(answer):
        arguments = msgspec.Raw(call["arguments"].encode())
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments})
    return blocks


def _in_pieces(block: dict[str, object]) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Return a block as it begins, and what is added to it."""
    if block["type"] == "thinking":
        return block | {"thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = bytes(cast("msgspec.Raw", block["input"])).decode()
    return block | {"input": msgspec.Raw(b"{}")}, [{"type": "input_json_delta", "partial_json": arguments}]


def _usage(answer: Answer, output_tokens: int) -> dict[str, int]:
    """Return the usage; here, tokens that were read from a cache are no input tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": output_tokens,
    }


MESSAGES = Dialect(
    path="/v1/messages",
    parse=parse_request,
    body=answer_body,
    events=answer_events,
    keep_alive=named_event({"type": "ping"}),
    error=error_reply,
    late_error=_late_error,
)
