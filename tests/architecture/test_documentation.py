# pyright: basic
"""What the documentation says is true: generated pages, configurations, command lines, doors, links."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from etude.cli.main import cli
from etude.errors import ConfigError
from etude.runtime.settings import json_schema, load_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHELLS = {"bash", "sh", "console"}
RUNNABLE = "<!-- runnable -->"


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    language: str
    text: str
    marked: str
    """The line before the block."""


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^([^\n]*)\n+```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(2)) + 1
            yield Block(f"{page.relative_to(ROOT)}:{line}", match[2], match[3], match[1])


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every line of a shell block and every piece of inline code that calls etude."""
    for block in blocks():
        if block.language in SHELLS:
            for line in block.text.replace("\\\n", " ").splitlines():
                if "etude " in line:
                    yield block.place, shlex.split(line.removeprefix("$ "), comments=True)
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for match in re.finditer(r"`((?:[A-Z_]+=\S+ )*etude [^`]+)`", prose):
            yield str(page.relative_to(ROOT)), shlex.split(match[1])


def unknown_word(words: list[str]) -> str | None:
    """Return the first word of a command line that names no command and no option."""
    while words and words[0] != "etude":
        words = words[1:]
    command: click.Command = cli
    context = click.Context(cli)
    options = {"--help"}
    for word in words[1:]:
        if word in {">", "|", "&&", ";"}:
            return None
        options |= {name for parameter in command.params for name in parameter.opts}
        if word.startswith("-"):
            if word.partition("=")[0] not in options:
                return word
        elif isinstance(command, click.Group) and word not in {"COMMAND", "…"}:
            found = command.get_command(context, word)
            if found is None:
                return word
            command = found
    return None


def doors() -> list[tuple[str, str]]:
    """Return file and dotted name of each door in the walk."""
    rows = [line for line in (ROOT / "docs" / "walk.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    return re.findall(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)\)", "\n".join(rows))


def names_in(path: Path) -> set[str]:
    """Return functions and classes of a file, and `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_generated_pages_say_what_their_sources_say():
    script = [sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_every_configuration_field_is_described():
    schema: Any = json_schema()
    undescribed = [
        f"{table}.{key}"
        for table, definition in schema["$defs"].items()
        for key, field in definition["properties"].items()
        if not field.get("description") and "$ref" not in field
    ]
    assert not undescribed


def test_configurations_in_the_documentation_load(tmp_path):
    found = [block for block in blocks() if block.language == "toml"]
    assert found
    for number, block in enumerate(found):
        file = tmp_path / f"{number}.toml"
        file.write_text(block.text)
        try:
            load_settings(file, (), {})
        except ConfigError as error:
            pytest.fail(f"{block.place}: {error}")


def test_recipes_load():
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert recipes
    for recipe in recipes:
        load_settings(recipe, (), {})


def test_command_lines_in_the_documentation_exist():
    found = list(command_lines())
    assert found
    assert not [(place, words) for place, words in found if unknown_word(words) is not None]


@pytest.mark.parametrize("command", [["etude", "trian", "x"], ["etude", "run", "--sett", "x"], ["A=1", "etude", "-q"]])
def test_a_command_line_that_does_not_exist_is_noticed(command):
    assert unknown_word(command) is not None


def test_make_targets_in_the_documentation_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(page.read_text() for page in PAGES)
    called = set(re.findall(r"(?:^ {4}|^\$ |^|`)make ([a-z]+)\b", code, re.MULTILINE))
    assert {"quickstart", "test"} <= called
    assert called <= targets


@pytest.mark.parametrize("block", [block for block in blocks() if block.marked == RUNNABLE], ids=lambda b: b.place)
def test_snippets_marked_runnable_run(block, tmp_path):
    for name in ("recipes", "harnesses", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, f"{block.place}\n{result.stdout}\n{result.stderr}"


def test_every_door_of_the_walk_exists():
    found = doors()
    assert len(found) > 12
    missing = [(name, file) for name, file in found if not (ROOT / file).exists() or name not in names_in(ROOT / file)]
    assert not missing


def test_links_between_files_lead_somewhere():
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead
