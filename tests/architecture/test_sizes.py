# pyright: basic
"""A reader can hold any file and any function in the head."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "etude"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def functions() -> Iterator[tuple[str, int]]:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{path.relative_to(SOURCES)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_no_file_is_longer_than_400_lines():
    lengths = {path.relative_to(SOURCES): len(path.read_text().splitlines()) for path in SOURCES.rglob("*.py")}
    assert lengths
    assert not {path: length for path, length in lengths.items() if length > MAX_FILE_LINES}


def test_no_function_is_longer_than_60_lines():
    assert not {name: length for name, length in functions() if length > MAX_FUNCTION_LINES}


def test_packages_say_nothing_of_their_own():
    packages = [path for path in SOURCES.rglob("__init__.py") if path.parent != SOURCES]
    assert packages
    assert not [path for path in packages if path.read_text().strip()]


def test_no_package_is_a_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "core", "base", "managers", "misc"}
    assert not [path for path in SOURCES.rglob("*") if path.stem in drawers]
