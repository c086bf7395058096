# pyright: basic
"""Every kind of failure that was reported is tested, or says why it is not."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = """
[rooms]
[[section]]
number = 1
title = "Hangs"
file = "test_section_1_hangs.py"
[[section.row]]
id = "P-1"
[[section.row]]
id = "P-2"
"""
TESTS = """
WAITS = {"P-2": "planner: later"}

@pytest.mark.slow
@pytest.mark.row("P-1")
async def test_that_nothing_hangs():
    "Nothing hangs."

def test_of_no_row(): ...
"""


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("failures_page", ROOT / "scripts" / "failures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_are_found_by_the_rows_that_they_name(table, tmp_path):
    (tmp_path / "rows.toml").write_text(SECTION)
    (tmp_path / "test_section_1_hangs.py").write_text(TESTS)
    (section,) = table.sections(tmp_path)
    assert [(test.name, test.shows) for test in section.tests_of("P-1")] == [
        ("test_that_nothing_hangs", "Nothing hangs.")
    ]
    assert section.tests_of("P-2") == []
    assert section.waits == {"P-2": "planner: later"}


def test_a_test_of_a_row_that_does_not_exist_is_refused(table, tmp_path):
    (tmp_path / "rows.toml").write_text(SECTION)
    (tmp_path / "test_section_1_hangs.py").write_text(TESTS.replace('row("P-1")', 'row("P-99")'))
    with pytest.raises(ValueError, match=r"test_that_nothing_hangs names P-99, which rows\.toml does not have"):
        table.sections(tmp_path)


def test_every_test_of_a_row_says_what_it_shows(table):
    assert not [test.name for section in table.sections() for test in section.tests if not test.shows]


def test_no_row_is_missing(table):
    for section in table.sections():
        settled = (
            {row for test in section.tests for row in test.rows} | section.not_applicable.keys() | section.waits.keys()
        )
        assert [row["id"] for row in section.rows if row["id"] not in settled] == []


def test_no_row_has_two_states(table):
    for section in table.sections():
        rows = {row["id"] for row in section.rows}
        tested = {row for test in section.tests for row in test.rows} & rows
        states = [*tested, *section.not_applicable, *section.waits]
        assert len(states) == len(set(states))
        assert set(states) <= rows


def test_a_row_waits_only_for_a_room_that_does_not_exist_yet(table):
    rooms = table.rooms_to_come()
    built = {room for room, path in rooms.items() if (ROOT / path).exists()}
    waits = {row: reason.partition(":")[0] for section in table.sections() for row, reason in section.waits.items()}
    assert not built, f"{built} exist: write the tests that waited for them, and take them out of rows.toml"
    assert set(waits.values()) <= rooms.keys()
