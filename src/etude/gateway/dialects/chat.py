"""OpenAI's Chat Completions: requests in, answers, event streams and errors out."""

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import msgspec

from etude.gateway.dialects.dialect import (
    NO_LOGPROBS,
    NO_PREFILL,
    ONLY_TEXT,
    Dialect,
    HarnessRequest,
    ToolChoice,
    choice_rules,
    conversation_of,
    decode,
    joined_text,
    requested_of,
    require,
    told_arguments,
)
from etude.gateway.dialects.pieces import Pieces
from etude.gateway.refusals import NOT_FOUND, OVER, CallRefusedError, malformed
from etude.gateway.sessions import Answer

_TEXT_PARTS = ("text", "input_text", "output_text")
"""The latter two are those of Responses, which many clients send in both."""
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True):
    function: _Function
    id: str | None = None
    type: Literal["function"] | None = None


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: msgspec.Raw = msgspec.Raw(b"null")
    prefix: bool | None = None
    partial: bool | None = None


class _FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: str | None = None
    function: _FunctionDefinition | None = None


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a harness may ask for; it gets the session's sampling instead, and no more tokens than it asked for."""

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
    model: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    response_format: msgspec.Raw = msgspec.Raw(b"null")
    # What other servers call the same.
    guided_json: msgspec.Raw = msgspec.Raw(b"null")
    guided_regex: msgspec.Raw = msgspec.Raw(b"null")
    guided_choice: msgspec.Raw = msgspec.Raw(b"null")
    guided_grammar: msgspec.Raw = msgspec.Raw(b"null")
    structured_outputs: msgspec.Raw = msgspec.Raw(b"null")
    functions: msgspec.Raw = msgspec.Raw(b"null")
    n: int | None = None
    logprobs: bool | int | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


def parse_request(body: bytes) -> HarnessRequest:
    """Return what a body asks for; raise `CallRefusedError` (400) naming the first thing that is wrong.

    What would change the distribution that tokens are drawn from in a way that cannot be recorded (several choices, a
    forced tool, a response format) is refused rather than ignored.
    """
    chat = decode(body, _Body)
    sampling = decode(body, _Sampling)
    tools, left_out = _sorted_tools(chat.tools or ())
    _check(chat, tools)
    return HarnessRequest(
        conversation=conversation_of(_plain_messages(chat.messages), tools),
        model=(chat.model or "")[:256],
        stream=bool(chat.stream),
        include_usage=chat.stream_options is not None and bool(chat.stream_options.include_usage),
        requested=requested_of(sampling, left_out_tools=left_out),
    )


def answer_body(answer: Answer, request: HarnessRequest) -> bytes:
    """Return the JSON of a `chat.completion`. `created` is 0: an answer that is replayed is the same, byte for byte."""
    message = _told(answer)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    return msgspec.json.encode(
        _envelope(answer, request, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}
    )


def answer_events(answer: Answer, request: HarnessRequest) -> Iterator[bytes]:
    """Yield the events of a stream that tells a finished answer: role, text, tool calls, end, usage, done."""
    envelope = _envelope(answer, request, "chat.completion.chunk")

    def chunk(delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _event(envelope | {"choices": [choice]})

    message = _told(answer)
    yield chunk({"role": "assistant", "content": "" if message.get("content") is not None else None})
    for fields in (("reasoning_content", "reasoning"), ("content",)):
        if message.get(fields[0]):
            yield chunk({field: message[field] for field in fields})
    calls = cast("list[dict[str, object]]", message.get("tool_calls") or [])
    for index, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if request.include_usage:
        no_choices: list[object] = []
        yield _event(envelope | {"choices": no_choices, "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error_reply(refusal: CallRefusedError) -> tuple[int, dict[str, object]]:
    """Return status and envelope of an error; what is over is a 404, since litellm asks again after a 403."""
    return NOT_FOUND if refusal.status == OVER else refusal.status, error_envelope(refusal)


def error_envelope(refusal: CallRefusedError) -> dict[str, object]:
    """Return an error as OpenAI's APIs tell it."""
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}


def _event(payload: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def _late_error(refusal: CallRefusedError, _: HarnessRequest) -> bytes:
    return _event(error_envelope(refusal))


def _told(answer: Answer) -> dict[str, object]:
    """Return an answer's message; servers have two names for its reasoning, and clients know one of them."""
    message = answer.message
    reasoning = message.get("reasoning_content")
    return message | {"reasoning": reasoning} if reasoning else message


def _sorted_tools(tools: Sequence[_Tool]) -> tuple[list[dict[str, object]], list[str]]:
    """Return the tools that the harness runs, and the types of those that only the provider could run."""
    offered: list[dict[str, object]] = []
    left_out: list[str] = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "function", "custom"):
            left_out.append(tool.type)
        elif tool.type == "custom" or tool.function is None:
            raise malformed(f"tools[{index}]: a tool has the type function here, and a field function with its name")
        else:
            offered.append({"type": "function", "function": msgspec.to_builtins(tool.function)})
    return offered, left_out


def _check(chat: _Body, tools: Sequence[object]) -> None:
    begun = any(message.prefix or message.partial for message in chat.messages)
    begun = begun or bool(chat.continue_final_message) or chat.add_generation_prompt is False
    legacy = any(bytes(message.function_call) != b"null" for message in chat.messages)
    require(
        [
            (chat.n in (None, 1), "n: only one choice can be asked for"),
            (not chat.logprobs, f"logprobs: {NO_LOGPROBS}"),
            (bytes(chat.functions) == b"null" and not legacy, "functions, function_call: use tools instead"),
            *choice_rules(chat.tool_choice, tools),
            (_is_text(chat), f"response_format, guided_json and the like: {ONLY_TEXT}"),
            (not begun, f"continue_final_message, add_generation_prompt, prefix, partial: {NO_PREFILL}"),
        ]
    )


def _is_text(chat: _Body) -> bool:
    guided = (chat.guided_json, chat.guided_regex, chat.guided_choice, chat.guided_grammar, chat.structured_outputs)
    formats = (bytes(chat.response_format).replace(b" ", b""), *map(bytes, guided))
    return formats[0] in (b"null", b'{"type":"text"}') and set(formats[1:]) == {b"null"}


def _plain_messages(messages: Sequence[_Message]) -> list[dict[str, object]]:
    pieces = Pieces()
    for index, message in enumerate(messages):
        text = joined_text(message.content, _TEXT_PARTS, f"messages[{index}]")
        if message.role == "assistant":
            _add_answer(pieces, message, text)
        elif message.role == "tool":
            pieces.report(message.tool_call_id or "", text)
        else:
            pieces.say("system" if message.role == "developer" else message.role, text)
    return pieces.messages


def _add_answer(pieces: Pieces, message: _Message, text: str) -> None:
    """Add a message as an answer of its own; calls that were drawn in an earlier one belong there."""
    pieces.end_answer()
    if reasoning := message.reasoning_content or message.reasoning:
        pieces.think(reasoning)
    if text or not message.tool_calls:
        pieces.write(text)
    for call in message.tool_calls or ():
        pieces.call(call.id or "", call.function.name, told_arguments(call.function.arguments))


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
