"""Writes the generated pages of the documentation: python scripts/docs.py [--check].

With --check nothing is written: the exit code is 1 when a page differs from what its source says.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import failures

from etude.cli.main import cli
from etude.runtime.settings import json_schema
from etude.telemetry.metrics import markdown as metrics_page

DOCS = Path(__file__).parent.parent / "docs"
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

CONFIGURATION = """# Configuration

A run is told everything in one TOML file. Every key is optional; an unknown one is refused with the key that was
probably meant. Values come from, each overriding the one before: the default, the file, an environment variable such as
`ETUDE__TRAINER__LR=1e-5`, and `--set trainer.lr=1e-5`. `etude config show CONFIG` prints the result with the origin of
each value, and so does `--dry-run` of every command that works on a run. `etude config schema` prints the JSON Schema
for editors. Why it is so: [0007](design/0007-configuration.md).

Generated from `etude/config.py` by `make docs`.
"""

COMMANDS = """# Commands

`etude COMMAND --help` prints the same. What a command ends with: [exit codes](exit-codes.md).

Generated from `etude/cli` by `make docs`.
"""

DESIGN = """# Design notes

One decision each, numbered in the order in which they were reserved. A note says what the simplest thing would be, why
it fails, what was decided, and what would change our minds. How to write one: CONTRIBUTING.md.

Generated from the notes' headings by `make docs`.

"""


def main() -> int:
    """Write every page, or with `--check` name those that are out of date."""
    pages = {
        DOCS / "configuration.md": configuration_page(json_schema()),
        DOCS / "commands.md": commands_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "failures.md": failures.page(),
        DOCS / "design" / "index.md": design_page(),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"docs/{path.relative_to(DOCS)} is out of date; run: make docs\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
    return 0


def configuration_page(schema: Mapping[str, Any]) -> str:
    """Return a section per table of the configuration, and a row per key."""
    sections = [CONFIGURATION]
    for header, table in _tables(schema, schema["$defs"], ""):
        rows = [
            f"| `{key}` | {_type(field)} | `{_toml(field['default'])}` | {field['description']} |"
            if "default" in field
            else f"| `{key}` | {_type(field)} | required | {field['description']} |"
            for key, field in table["properties"].items()
            if not _referred(field)
        ]
        if rows:
            title = f"## `{header}`\n\n" if header else "## Before the first table\n\n"
            head = "| key | value | default | meaning |\n|---|---|---|---|\n"
            sections.append(f"{title}{table['description']}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(sections)


def _tables(
    table: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each table with the header that it has in TOML, parents first."""
    yield (f"[{prefix}]" if prefix and not prefix.startswith("[") else prefix), table
    for key, field in table["properties"].items():
        if name := _referred(field):
            path = f"{prefix}.{key}" if prefix else key
            yield from _tables(definitions[name], definitions, f"[[{path}]]" if "items" in field else path)


def _referred(field: Mapping[str, Any]) -> str:
    """Return the name of the table that a field holds, or a list of; empty when it holds a value."""
    reference = field.get("$ref") or field.get("items", {}).get("$ref", "")
    return reference.rpartition("/")[2]


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if value != "")
    if "anyOf" in field:
        return _type(next(option for option in field["anyOf"] if option.get("type") != "null"))
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if field["type"] == "object":
        return "table of strings"
    bounds = [f"{sign} {field[bound]:g}" for bound, sign in BOUNDS.items() if bound in field]
    return " ".join([field["type"], ", ".join(bounds)]).strip()


def _toml(value: object) -> str:
    """Return a default as TOML writes it."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def commands_page() -> str:
    """Return what `--help` prints of every command that is not hidden."""
    blocks = [COMMANDS]
    context = click.Context(cli, info_name="etude")
    for path, command, parent in _commands(cli, "etude", context):
        with click.Context(command, info_name=path.split()[-1], parent=parent, terminal_width=100) as inner:
            blocks.append(f"## `{path}`\n\n```text\n{command.get_help(inner)}\n```\n")
    return "\n".join(blocks)


def _commands(
    group: click.Group, path: str, context: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=context)
            yield from _commands(command, f"{path} {name}", inner)
        else:
            yield f"{path} {name}", command, context


def design_page() -> str:
    """Return a list of the notes, by number."""
    notes = sorted((DOCS / "design").glob("[0-9]*.md"))
    titles = [(note.name, re.sub(r"^# \d+:? ", "", note.read_text().partition("\n")[0])) for note in notes]
    return DESIGN + "".join(f"- [{name[:4]} {title}]({name})\n" for name, title in titles)


if __name__ == "__main__":
    sys.exit(main())
