"""Promises of the harness's directory and command."""

from pathlib import Path

import pytest

from etude.config import CompactionSection, HarnessSection
from etude.errors import HarnessError
from etude.rollout.harness import (
    COMPACTION_TRIGGER,
    harness_command,
    harness_directory,
    harness_name,
    harness_variables,
)
from etude.types import Task

TASK = Task(task_id="t", path="/tasks/t", digest="d", instruction="a b; $(c) {instruction}")


def test_the_instruction_is_one_argument_whatever_is_in_it():
    section = HarnessSection(command=("agent", "--task={instruction}", "--fast"))
    assert harness_command(section, TASK) == ("agent", "--task=a b; $(c) {instruction}", "--fast")


def test_the_built_in_harness_gets_the_instruction_and_is_there():
    section = HarnessSection()
    assert harness_command(section, TASK)[-1] == TASK.instruction
    assert (harness_directory(section) / "mini.py").is_file()
    assert harness_name(section) == "mini"


def test_a_missing_directory_is_refused_with_its_setting(tmp_path: Path):
    assert harness_directory(HarnessSection(files=str(tmp_path))) == tmp_path
    with pytest.raises(HarnessError, match=r"harness\.files = .*nowhere"):
        harness_directory(HarnessSection(files=str(tmp_path / "nowhere")))


def test_a_harness_is_told_when_to_compact_only_if_it_is_to():
    off = harness_variables(HarnessSection(env={"A": "b"}), url="http://h:1/v1", key="k")
    assert COMPACTION_TRIGGER not in off
    section = HarnessSection(env={"A": "b"}, compaction=CompactionSection(trigger_tokens=70))
    assert harness_variables(section, url="http://h:1/v1", key="k") == {**off, COMPACTION_TRIGGER: "70"}
    assert off["A"] == "b"
    assert off["ANTHROPIC_BASE_URL"] == "http://h:1"
