# pyright: basic
import io
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.telemetry.console import open_console
from etude.telemetry.lines import printable, step_line

ROW = {
    "step": 3,
    "version": 4,
    "reward/mean": 0.25,
    "reward/pass_rate": 0.5,
    "staleness/max_versions": 2,
    "mismatch/k3/full": 1e-5,
    "mismatch/k3/half": 2e-3,
    "rollout/infra_errors_count": 0,
    "rollout/groups_lost_count": 1,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_with_what_the_row_has():
    line = step_line(ROW, total=20)
    assert line.startswith("step 3/20  v4  reward 0.250  pass 0.500  max 2")
    assert "k3 full 1.00e-05 half 2.00e-03" in line
    assert "groups lost 1" in line
    assert "infra" not in line
    assert "entropy" not in line


@given(st.text())
def test_text_from_outside_cannot_move_the_cursor(text):
    shown = printable(text, limit=50)
    assert shown.isprintable()
    assert len(shown) <= 50 * 10


def test_escapes_are_shown_as_what_they_are():
    assert printable("a\x1b[2J\r\nb\u202e") == "a\\x1b[2J\\r\\nb\\u202e"


def test_a_file_gets_plain_lines():
    stream = io.StringIO()
    console = open_console("auto", stream)
    console.note("[bold]not markup[/bold] \x1b[31m")
    console.step(ROW)
    with console.progress("pretrain", 1000) as advance:
        for _ in range(1000):
            advance(1)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[bold]not markup[/bold] \\x1b[31m"
    assert lines[1].startswith("step 3  v4")
    assert lines[2:] == [f"pretrain: {n}/1000" for n in range(100, 1001, 100)]


def test_machines_get_one_object_per_line():
    stream = io.StringIO()
    console = open_console("json", stream)
    console.note("hello\nthere")
    console.step({**ROW, "trainer/loss": float("nan")}, total=20)
    with console.progress("sft", 2) as advance:
        advance(1)
        advance(1)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["note", "step", "progress", "progress"]
    assert events[0]["text"] == "hello\nthere"
    assert (events[1]["total"], events[1]["reward/mean"], events[1]["trainer/loss"]) == (20, 0.25, "nan")
    assert events[3] == {"event": "progress", "label": "sft", "done": 2, "total": 2}


@pytest.mark.parametrize("text", ["[bold]x[/bold]", ":smile:", "[/nothing]"])
def test_a_terminal_shows_text_from_outside_as_it_is(text):
    stream = Terminal()
    console = open_console("auto", stream)
    console.note(text)
    with console.progress(text, 2) as advance:
        advance(1)
        console.step(ROW)
        advance(1)
    shown = stream.getvalue()
    assert shown.startswith(text + "\n")
    assert "reward 0.250" in shown


def test_a_console_for_machines_does_not_load_rich():
    code = "import sys, etude.telemetry.console as c; c.open_console('json', sys.stdout); print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
