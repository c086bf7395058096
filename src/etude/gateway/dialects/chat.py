"""OpenAI's Chat Completions: requests in, answers, event streams and errors out."""

from collections.abc import Iterator
from typing import Literal, cast

import msgspec

from etude.gateway.dialects.dialect import (
    Dialect,
    HarnessRequest,
    conversation_of,
    decode,
    requested_of,
    require,
)
from etude.gateway.refusals import CallRefusedError, malformed
from etude.gateway.sessions import Answer

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "server_error"}


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct, frozen=True):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"] = "function"
    function: _FunctionDefinition


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a harness may ask for; it gets the session's sampling instead."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    reasoning_effort: str | None = None


class _Body(msgspec.Struct, frozen=True):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: msgspec.Raw = msgspec.Raw(b"null")
    response_format: msgspec.Raw = msgspec.Raw(b"null")
    functions: msgspec.Raw = msgspec.Raw(b"null")
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


def parse_request(body: bytes) -> HarnessRequest:
    """Return what a body asks for; raise `CallRefusedError` (400) naming the first thing that is wrong.

    What would change the distribution that tokens are drawn from in a way that cannot be recorded (several choices, a
    forced tool, a response format) is refused rather than ignored.
    """
    chat = decode(body, _Body)
    sampling = decode(body, _Sampling)
    _check(chat)
    return HarnessRequest(
        conversation=conversation_of(
            [_plain_message(message, index) for index, message in enumerate(chat.messages)],
            [msgspec.to_builtins(tool) for tool in chat.tools or ()],
        ),
        model=chat.model[:256],
        stream=bool(chat.stream),
        include_usage=chat.stream_options is not None and bool(chat.stream_options.include_usage),
        requested=requested_of(sampling),
    )


def answer_body(answer: Answer, request: HarnessRequest) -> bytes:
    """Return the JSON of a `chat.completion`. `created` is 0: an answer that is replayed is the same, byte for byte."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason, "logprobs": None}
    return msgspec.json.encode(
        _envelope(answer, request, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}
    )


def answer_events(answer: Answer, request: HarnessRequest) -> Iterator[bytes]:
    """Yield the events of a stream that tells a finished answer: role, text, tool calls, end, usage, done."""
    envelope = _envelope(answer, request, "chat.completion.chunk")

    def chunk(delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _event(envelope | {"choices": [choice]})

    message = answer.message
    yield chunk({"role": "assistant", "content": "" if message.get("content") is not None else None})
    for field in ("reasoning_content", "content"):
        if message.get(field):
            yield chunk({field: message[field]})
    calls = cast("list[dict[str, object]]", message.get("tool_calls") or [])
    for index, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if request.include_usage:
        no_choices: list[object] = []
        yield _event(envelope | {"choices": no_choices, "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error_reply(refusal: CallRefusedError) -> tuple[int, dict[str, object]]:
    """Return status and OpenAI's envelope of an error."""
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
    return refusal.status, {"error": error}


def _event(payload: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def _late_error(refusal: CallRefusedError, _: HarnessRequest) -> bytes:
    return _event(error_reply(refusal)[1])


def _check(chat: _Body) -> None:
    require(
        [
            (chat.n in (None, 1), "n: only one choice can be asked for"),
            (bytes(chat.functions) == b"null", "functions: use tools instead"),
            (bytes(chat.tool_choice) in (b"null", b'"auto"'), "tool_choice: only auto is possible"),
            (
                bytes(chat.response_format).replace(b" ", b"") in (b"null", b'{"type":"text"}'),
                "response_format: only text",
            ),
        ]
    )


def _plain_message(message: _Message, index: int) -> dict[str, object]:
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _plain_text(message.content, index),
    }
    if message.role == "assistant":
        if message.reasoning_content:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id or ""
    return plain


def _plain_text(content: str | list[_Part] | None, index: int) -> str | None:
    if not isinstance(content, list):
        return content
    for part in content:
        if part.type != "text":
            raise malformed(f"messages[{index}]: content of type {part.type[:32]!r} is not supported, only text is")
    return "\n".join(part.text for part in content)


def _envelope(answer: Answer, request: HarnessRequest, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{answer.call_id}", "object": kind, "created": 0, "model": request.model}


def _usage(answer: Answer) -> dict[str, object]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


CHAT = Dialect(
    path="/v1/chat/completions",
    parse=parse_request,
    body=answer_body,
    events=answer_events,
    keep_alive=b": keep-alive\n\n",
    error=error_reply,
    late_error=_late_error,
)
