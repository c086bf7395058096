"""OpenAI's Chat Completions: requests in, answers, event streams and errors out."""

from collections.abc import Iterator
from typing import Literal, cast

import msgspec

from etude.gateway.conversation import Conversation
from etude.gateway.refusals import CallRefusedError, malformed
from etude.gateway.sessions import Answer

PATH = "/v1/chat/completions"
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_TOOLS_BYTES = 1 << 20
MAX_TOOL_CALLS = 256
MAX_DEPTH = 32
"""Nesting of a tool's JSON schema."""

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


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that holds what it must."""

    conversation: Conversation
    model: str
    """Echoed in the answer; it chooses nothing."""
    stream: bool
    include_usage: bool
    requested: dict[str, object]


def parse_request(body: bytes) -> ChatRequest:
    """Return what a body asks for; raise `CallRefusedError` (400) naming the first thing that is wrong.

    What would change the distribution that tokens are drawn from in a way that cannot be recorded (several choices, a
    forced tool, a response format) is refused rather than ignored.
    """
    try:
        chat = msgspec.json.decode(body, type=_Body)
        sampling = msgspec.json.decode(body, type=_Sampling)
    except msgspec.DecodeError as error:
        raise malformed(f"the request's body does not fit: {error}") from error
    except RecursionError as error:
        raise malformed("the request's body is nested too deeply") from error
    _check(chat)
    return ChatRequest(
        conversation=Conversation(
            messages=tuple(_plain_message(message, index) for index, message in enumerate(chat.messages)),
            tools=tuple(_plain_tool(tool, index) for index, tool in enumerate(chat.tools or ())),
        ),
        model=chat.model[:256],
        stream=bool(chat.stream),
        include_usage=chat.stream_options is not None and bool(chat.stream_options.include_usage),
        requested=_bounded(sampling),
    )


def answer_body(answer: Answer, *, model: str) -> bytes:
    """Return the JSON of a `chat.completion`. `created` is 0: an answer that is replayed is the same, byte for byte."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason, "logprobs": None}
    return msgspec.json.encode(
        _envelope(answer, model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}
    )


def answer_events(answer: Answer, *, model: str, include_usage: bool) -> Iterator[bytes]:
    """Yield the events of a stream that tells a finished answer: role, text, tool calls, end, usage, done."""
    envelope = _envelope(answer, model, "chat.completion.chunk")

    def chunk(delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return event(envelope | {"choices": [choice]})

    message = answer.message
    yield chunk({"role": "assistant", "content": "" if message.get("content") is not None else None})
    for field in ("reasoning_content", "content"):
        if message.get(field):
            yield chunk({field: message[field]})
    calls = cast("list[dict[str, object]]", message.get("tool_calls") or [])
    for index, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if include_usage:
        no_choices: list[object] = []
        yield event(envelope | {"choices": no_choices, "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def event(payload: dict[str, object]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def error_payload(refusal: CallRefusedError) -> dict[str, object]:
    """Return OpenAI's envelope of an error."""
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}


def _check(chat: _Body) -> None:
    tools = chat.tools or ()
    calls = max((len(message.tool_calls or ()) for message in chat.messages), default=0)
    rules = [
        (0 < len(chat.messages) <= MAX_MESSAGES, f"messages: 1 to {MAX_MESSAGES} are expected"),
        (len(tools) <= MAX_TOOLS, f"tools: at most {MAX_TOOLS} are expected"),
        (len(msgspec.json.encode(tools)) <= MAX_TOOLS_BYTES, f"tools: more than {MAX_TOOLS_BYTES} bytes of JSON"),
        (calls <= MAX_TOOL_CALLS, f"messages: at most {MAX_TOOL_CALLS} tool calls each are expected"),
        (chat.n in (None, 1), "n: only one choice can be asked for"),
        (bytes(chat.functions) == b"null", "functions: use tools instead"),
        (bytes(chat.tool_choice) in (b"null", b'"auto"'), "tool_choice: only auto is possible"),
        (bytes(chat.response_format).replace(b" ", b"") in (b"null", b'{"type":"text"}'), "response_format: only text"),
    ]
    for holds, message in rules:
        if not holds:
            raise malformed(message)


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
    return "".join(part.text for part in content)


def _plain_tool(tool: _Tool, index: int) -> dict[str, object]:
    plain = msgspec.to_builtins(tool)
    if _is_deeper(plain, MAX_DEPTH):
        raise malformed(f"tools[{index}]: nested deeper than {MAX_DEPTH}")
    return plain


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = cast("dict[str, object]", value).values() if isinstance(value, dict) else cast("list[object]", value)
    return depth == 0 or any(_is_deeper(item, depth - 1) for item in inner)


def _bounded(sampling: _Sampling) -> dict[str, object]:
    """Return what was asked for, at most a few hundred bytes of it."""
    requested = msgspec.to_builtins(sampling)
    if isinstance(sampling.stop, list):
        requested["stop"] = [text[:64] for text in sampling.stop[:4]]
    return {name: value[:64] if isinstance(value, str) else value for name, value in requested.items()}


def _envelope(answer: Answer, model: str, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{answer.call_id}", "object": kind, "created": 0, "model": model}


def _usage(answer: Answer) -> dict[str, object]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
