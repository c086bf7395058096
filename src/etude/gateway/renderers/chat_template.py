"""A model directory's chat template, run in a sandbox: messages and tools to text."""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.errors import PolicyError
from etude.gateway.refusals import malformed
from etude.gateway.renderers.answers import MalformedCallError, calls_of, checked_arguments
from etude.gateway.renderers.family import Message

MAX_BYTES = 1 << 20
"""Of a template's source."""
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises that does not expect such a conversation."""


class _Arguments(dict[str, object]):
    """Arguments of a call, for templates that look into them; as JSON they are the characters that were drawn."""

    def __init__(self, raw: str) -> None:
        super().__init__(json.loads(raw))
        self.raw = raw


class _Generation(Extension):
    """`{% generation %}` marks answers for training libraries; here it marks nothing."""

    tags = frozenset({"generation"})  # pyright: ignore[reportIncompatibleVariableOverride, reportAssignmentType]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Source of a Hugging Face chat template and the names of special tokens that it may use.

    The clock is not among what it is given: a prompt that changes at midnight would be another prompt. Raises
    `PolicyError` when the source is none.
    """

    def __init__(self, source: str, names: Mapping[str, str] | None = None) -> None:
        if len(source.encode()) > MAX_BYTES:
            msg = f"the chat template is larger than {MAX_BYTES} bytes"
            raise PolicyError(msg)
        self.source = source
        self._names = dict(names or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            msg = f"the chat template cannot be read: {error}"
            raise PolicyError(msg) from error

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        opening: bool = True,
        mapped: bool = True,
    ) -> str:
        """Return the text of a conversation; refuse it, as a call that asks for it, when the template does.

        `mapped` gives the template arguments of calls as mappings, otherwise as text.
        """
        try:
            return self._template.render(
                messages=[_for_template(message, mapped=mapped) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=opening,
                raise_exception=_refuse,
                **self._names,
            )
        except (jinja2.TemplateError, RecursionError, *_MISTAKES) as error:
            told = str(error)[:256]
            raise malformed(f"the model's chat template refuses these messages: {told}") from error


def _for_template(message: Message, *, mapped: bool) -> dict[str, object]:
    told = dict(message) | {"content": message.get("content") or ""}
    if calls := calls_of(message):
        told["tool_calls"] = [call_message(call.name, call.arguments, call.call_id, mapped=mapped) for call in calls]
    return told


def call_message(name: str, arguments: str, call_id: str = "", *, mapped: bool = False) -> dict[str, object]:
    """Return a tool call in OpenAI's shape, `mapped` with arguments that a template can look into."""
    told: object = arguments
    if mapped:
        try:
            told = _Arguments(checked_arguments(arguments))
        except (MalformedCallError, ValueError, RecursionError):
            told = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": told}}


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the order that templates rely on
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    if isinstance(value, _Arguments):
        return value.raw
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
