"""Tools of Responses as the policy knows them: namespaces are one list to it, and a text is a parameter."""

from collections.abc import Sequence

import msgspec

from etude.gateway.dialects.dialect import function_tool
from etude.gateway.refusals import malformed

_OFFERED = ("function", "custom")
"""Types of tools that the harness runs."""
_UNDEFINED = ("local_shell", "shell", "apply_patch", "computer", "computer_use_preview")
"""The harness runs these too, but what they take only the provider's models know."""


class _Grammar(msgspec.Struct, frozen=True):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class Tool(msgspec.Struct, frozen=True):
    """A tool, or a namespace of them, as a request declares it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: _Grammar | None = None
    tools: "list[Tool] | None" = None
    """Of a namespace."""


def named_tools(tools: Sequence[Tool]) -> tuple[dict[str, tuple[str, Tool]], list[str]]:
    """Return the tools that the harness runs, with their namespaces, by the names that the policy knows them by.

    The types of those that only the provider could run come second. One that is declared twice alike is one.
    """
    named: dict[str, tuple[str, Tool]] = {}
    left_out: list[str] = []
    listed = [
        (tool.name or "" if tool.type == "namespace" else "", inner)
        for tool in tools
        for inner in (tool.tools or () if tool.type == "namespace" else (tool,))
    ]
    for namespace, tool in listed:
        name = known_as(namespace, tool.name or "")
        if tool.type in _UNDEFINED:
            raise malformed(f"tools: what {tool.type!r} takes is not known here, declare it as a function")
        if tool.type not in _OFFERED:
            left_out.append(tool.type)
        elif not tool.name:
            raise malformed(f"tools: a {tool.type} has no name, which stands beside its type here")
        elif named.setdefault(name, (namespace, tool)) != (namespace, tool):
            raise malformed(f"tools: two are called {name[:64]!r}, give each a name of its own")
    return named, left_out


def known_as(namespace: str, name: str) -> str:
    """Return the name that the policy knows a tool by, to whom tools of all namespaces are one list."""
    return f"{namespace}__{name}" if namespace else name


def plain_tool(name: str, placed: tuple[str, Tool]) -> dict[str, object]:
    """Return a tool for the policy, to whom a tool that takes one text is one with one parameter."""
    tool = placed[1]
    parameters = _text_parameter(tool.format) if tool.type == "custom" else tool.parameters
    return function_tool(name=name, description=tool.description, parameters=parameters, strict=tool.strict)


def _text_parameter(grammar: _Grammar | None) -> dict[str, object]:
    """Return the parameters of a tool that takes one text; its grammar is told, though nothing enforces it."""
    text = {"type": "string"}
    if grammar is not None and grammar.definition:
        text["description"] = f"Text of this grammar ({grammar.syntax}):\n{grammar.definition}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}
