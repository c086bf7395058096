"""The page docs/failures.md: every row of tests/failures/rows.toml with the tests that name it.

Tests are read, not imported: `@pytest.mark.row("P-7")` says which row a test is about, the first line of its docstring
what it shows. A row that cannot have one stands, with the reason, in the `NOT_APPLICABLE` or `WAITS` of its file.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent.parent / "tests" / "failures"

PAGE = """# Failures

What users of comparable systems reported in public, and the test that shows what becomes of it in etude. Each test
first lets the plain mistake happen, so that it is known to notice it, and then shows that etude survives or says at
once what is wrong. `make test ARGS=tests/failures` runs them all, `make nightly ARGS=tests/failures` with more kills.

Severity: A silently corrupts training or loses days, B ends the run, C wastes time.

Generated from `tests/failures` by `make docs`.
"""


class Test(NamedTuple):
    """A test function that names rows."""

    name: str
    file: str
    rows: tuple[str, ...]
    shows: str
    """First line of its docstring."""


class Section(NamedTuple):
    """One section of rows.toml, with what its test file says."""

    title: str
    rows: tuple[dict[str, Any], ...]
    tests: tuple[Test, ...]
    """That name one of its rows, wherever they stand."""
    not_applicable: dict[str, str]
    """Row to the reason."""
    waits: dict[str, str]
    """Row to the room that it waits for, a colon and the reason."""

    def tests_of(self, row: str) -> list[Test]:
        """Return the tests that name a row."""
        return [test for test in self.tests if row in test.rows]


def sections(directory: Path = TESTS) -> list[Section]:
    """Read the rows and what the test files say about them; raise `ValueError` for a row that does not exist."""
    tables = tomllib.loads((directory / "rows.toml").read_text())["section"]
    modules = {path.name: ast.parse(path.read_text()) for path in sorted(directory.glob("test_*.py"))}
    tests = [test for name, module in modules.items() for test in _tests(module, name)]
    known = {row["id"] for table in tables for row in table["row"]}
    for test in tests:
        if unknown := sorted({*test.rows} - known):
            msg = f"{test.file}: {test.name} names {', '.join(unknown)}, which rows.toml does not have"
            raise ValueError(msg)
    return [_section(table, modules.get(table["file"], ast.parse("")), tests) for table in tables]


def rooms_to_come(directory: Path = TESTS) -> dict[str, str]:
    """Return the rooms that a row may wait for, each with the path that will exist when it does."""
    return tomllib.loads((directory / "rows.toml").read_text())["rooms"]


def page() -> str:
    """Return the page: a summary, and a table per section."""
    found = sections()
    tables = [f"## {number}. {section.title}\n\n{_table(section)}" for number, section in enumerate(found, start=1)]
    return "\n".join([PAGE, _summary(found), *tables])


def _section(table: dict[str, Any], module: ast.Module, tests: list[Test]) -> Section:
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in {"NOT_APPLICABLE", "WAITS"}
    }
    rows = {row["id"] for row in table["row"]}
    return Section(
        table["title"],
        tuple(table["row"]),
        tuple(test for test in tests if rows.intersection(test.rows)),
        constants.get("NOT_APPLICABLE", {}),
        constants.get("WAITS", {}),
    )


def _tests(module: ast.Module, file: str) -> Iterator[Test]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            rows = tuple(row for decorator in node.decorator_list for row in _rows(decorator))
            yield Test(node.name, file, rows, (ast.get_docstring(node) or "").partition("\n")[0])


def _rows(decorator: ast.expr) -> list[str]:
    """Return the rows of a `pytest.mark.row(...)`."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.row":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def _summary(found: list[Section]) -> str:
    rows = [(section, row["id"]) for section in found for row in section.rows]
    tested = sum(bool(section.tests_of(row)) for section, row in rows)
    waiting = sum(row in section.waits for section, row in rows)
    impossible = sum(row in section.not_applicable for section, row in rows)
    return f"{len(rows)} kinds: {tested} tested, {waiting} waiting, {impossible} that cannot happen here.\n"


def _table(section: Section) -> str:
    head = "| row | severity | what goes wrong, with reports | what is shown | status |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {row['id']} | {row['severity']} | {_told(row)} | {shown} | {status} |\n"
        for row in section.rows
        for shown, status in [(_shown(section, row["id"]), _status(section, row["id"]))]
    )


def _told(row: dict[str, Any]) -> str:
    """Return the kind of failure and links to the reports, named like `verl-project/verl#3895`."""
    links = [re.sub(r"https://github.com/(.+)/\w+/(\d+)$", rf"[\1#\2]({url})", url) for url in row["reports"]]
    return f"{row['kind']} ({', '.join(links)})" if links else row["kind"]


def _shown(section: Section, row: str) -> str:
    return " ".join(f"{test.shows} [`{test.name}`](../tests/failures/{test.file})" for test in section.tests_of(row))


def _status(section: Section, row: str) -> str:
    if row in section.not_applicable:
        return f"cannot apply: {section.not_applicable[row]}"
    if row in section.waits:
        return f"waits for {section.waits[row]}"
    return "tested" if section.tests_of(row) else "missing"
