"""What all dialects share: the record of one, a request that was understood, and the bounds of a request."""

import base64
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Protocol, TypeVar, cast

import msgspec

from etude.gateway.conversation import Conversation
from etude.gateway.refusals import CallRefusedError, malformed
from etude.gateway.sessions import Answer

ONLY_TEXT = "only text is possible, leave it out and ask for the format in a message"
NO_PREFILL = "this model does not support assistant message prefill, the conversation must end with a user message"
"""Harnesses look for these words."""
NO_LOGPROBS = "none are told here, leave it out"

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_TOOLS_BYTES = 1 << 19
"""Of a tool's schema anything can be made: half a million empty lists would hold up the loop for a second."""
MAX_TOOL_CALLS = 256
MAX_DEPTH = 32
"""Nesting of a tool's JSON schema."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPES = re.compile(
    rb"\\(?:(?:\\\\)*\\"
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2}))"
)
"""Escaped backslashes, whole characters, and halves of them; a `u` right behind escaped backslashes is text."""
_MOST_ESCAPES = 1 << 18
"""Looked at in one body, which takes a tenth of a second."""

_T = TypeVar("_T")


class HarnessRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that holds what it must."""

    conversation: Conversation
    model: str
    """Echoed in the answer; it chooses nothing."""
    stream: bool
    requested: dict[str, object]
    """What is recorded and not honoured: the sampling, and tools that only the provider could run."""
    include_usage: bool = False
    """Chat Completions: whether a stream ends with its usage."""
    custom_tools: frozenset[str] = frozenset()
    """Responses: names of the tools that take one text instead of JSON."""
    namespaces: dict[str, str] = {}
    """Responses: the namespaces of tools that are in one, by the names that the policy knows them by."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one API spells requests, answers, streams and errors."""

    path: str
    parse: Callable[[bytes], HarnessRequest]
    """Raises `CallRefusedError` (400) naming the first thing that is wrong."""
    body: Callable[[Answer, HarnessRequest], bytes]
    events: Callable[[Answer, HarnessRequest], Iterator[bytes]]
    """The whole stream of a finished answer."""
    keep_alive: bytes
    """Keeps a stream open that has nothing to say yet."""
    error: Callable[[CallRefusedError], tuple[int, dict[str, object]]]
    """Status and envelope."""
    late_error: Callable[[CallRefusedError, HarnessRequest], bytes]
    """Ends a stream that has begun."""


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tool is to be called, where it takes more than a word to say so."""

    type: str = "auto"
    disable_parallel_tool_use: bool | None = None


class _Tools(msgspec.Struct, frozen=True):
    """A body of which only the size of its tools is looked at."""

    tools: msgspec.Raw = msgspec.Raw(b"")


def decode(body: bytes, kind: type[_T]) -> _T:
    """Return a body as a record; raise `CallRefusedError` (400) when it is none.

    Half a character becomes U+FFFD, as in a browser: programs in JavaScript cut texts between the two halves of an
    emoji, and send that again in every later request.
    """
    try:
        body.decode()
        if len(body) > MAX_TOOLS_BYTES and len(bytes(_decoded(body, _Tools).tools)) > MAX_TOOLS_BYTES:
            raise malformed(f"tools: more than {MAX_TOOLS_BYTES} bytes of JSON")
        return _decoded(body, kind)
    except UnicodeDecodeError as error:
        raise malformed("the request's body is not UTF-8") from error
    except msgspec.DecodeError as error:
        raise malformed(f"the request's body does not fit: {error}") from error
    except RecursionError as error:
        raise malformed("the request's body is nested too deeply") from error


def _decoded(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if _SURROGATE.search(body) is None:
            raise
    return msgspec.json.decode(_ESCAPES.sub(_whole_character, body, count=_MOST_ESCAPES), type=kind)


def _whole_character(found: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if found["half"] else found[0]


def told_arguments(text: str | None) -> str:
    """Return the arguments of a call that a harness tells: of one without any, clients send all sorts of nothing."""
    return text if text is not None and text.strip() not in ("", "null") else "{}"


def require(rules: Sequence[tuple[bool, str]]) -> None:
    """Raise `CallRefusedError` (400) with the message of the first rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise malformed(message)


def choice_rules(choice: str | ToolChoice | None, tools: Sequence[object]) -> list[tuple[bool, str]]:
    """Return the rules for `require` that leave the choice of a tool to the policy."""
    kind = choice.type if isinstance(choice, ToolChoice) else choice or "auto"
    return [
        (kind != "none" or not tools, "tool_choice: none cannot be enforced here, leave the tools out"),
        (kind in ("auto", "none"), "tool_choice: only auto is possible, leave it out"),
    ]


class _TextPart(Protocol):
    @property
    def type(self) -> str: ...

    @property
    def text(self) -> str | None: ...


def joined_text(content: str | Sequence[_TextPart] | None, kinds: Container[str], where: str) -> str:
    """Return the text of a content; raise `CallRefusedError` (400) when a part is of none of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in kinds:
            raise only_text(part.type, where)
    return "\n".join(part.text or "" for part in content)


def only_text(kind: str, where: str) -> CallRefusedError:
    """The policy reads no images and no files."""
    return malformed(f"{where}: content of type {kind[:32]!r} is not supported here, say in text what it holds")


def conversation_of(messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]) -> Conversation:
    """Return a conversation within the bounds; raise `CallRefusedError` (400)."""
    calls = max((len(cast("list[object]", message.get("tool_calls", []))) for message in messages), default=0)
    require(
        [
            (0 < len(messages) <= MAX_MESSAGES, f"messages: 1 to {MAX_MESSAGES} are expected"),
            (calls <= MAX_TOOL_CALLS, f"messages: at most {MAX_TOOL_CALLS} tool calls each are expected"),
            (len(tools) <= MAX_TOOLS, f"tools: at most {MAX_TOOLS} are expected"),
            (len(msgspec.json.encode(tools)) <= MAX_TOOLS_BYTES, f"tools: more than {MAX_TOOLS_BYTES} bytes of JSON"),
        ]
    )
    for index, tool in enumerate(tools):
        if is_deeper(tool, MAX_DEPTH):
            raise malformed(f"tools[{index}]: nested deeper than {MAX_DEPTH}")
        if not cast("Mapping[str, object]", tool["function"])["name"]:
            raise malformed(f"tools[{index}]: has no name")
    return Conversation(messages=tuple(messages), tools=tuple(tools))


def function_tool(**fields: object) -> dict[str, object]:
    """Return a tool in OpenAI's shape; what is None is left out."""
    function = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def is_deeper(value: object, depth: int) -> bool:
    """Return whether dicts and lists are nested deeper than `depth`."""
    if not isinstance(value, (dict, list)):
        return False
    inner = cast("dict[str, object]", value).values() if isinstance(value, dict) else cast("list[object]", value)
    return depth == 0 or any(is_deeper(item, depth - 1) for item in inner)


def bounded(value: object) -> object:
    """Return what was asked for, at most a few kilobytes of it, to keep in a record."""
    if isinstance(value, str):
        return value[:64]
    if isinstance(value, dict):
        items = list(cast("dict[str, object]", value).items())[:32]
        return {name[:64]: bounded(item) for name, item in items}
    if isinstance(value, list):
        return [bounded(item) for item in cast("list[object]", value)[:16]]
    # Larger ones cannot be written as JSON numbers again.
    return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)[:64]


def requested_of(sampling: msgspec.Struct, **others: object) -> dict[str, object]:
    """Return the sampling that was asked for, and whatever else is worth a record, without what is empty."""
    fields = cast("dict[str, object]", msgspec.to_builtins(sampling))
    return cast("dict[str, object]", bounded(fields | {name: value for name, value in others.items() if value}))


def tool_calls_of(answer: Answer) -> list[dict[str, str]]:
    """Return an answer's tool calls, each with `id`, `name` and `arguments`."""
    calls = cast("Sequence[Mapping[str, object]]", answer.message.get("tool_calls") or ())
    return [{"id": str(call["id"]), **cast("dict[str, str]", call["function"])} for call in calls]


def signature_of(answer: Answer) -> str:
    """Return what vouches for an answer's reasoning: a digest, the same each time that the answer is told."""
    reasoning = str(answer.message.get("reasoning_content") or "")
    return base64.b64encode(sha256(f"{answer.call_id} {reasoning}".encode()).digest()).decode()


def named_event(payload: Mapping[str, object]) -> bytes:
    """Return one server-sent event that is named after its `type`."""
    return f"event: {payload['type']}\ndata: ".encode() + msgspec.json.encode(payload) + b"\n\n"
