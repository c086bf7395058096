"""Promises of the harness's directory and command."""

from pathlib import Path

import pytest

from etude.config import HarnessSection
from etude.errors import HarnessError
from etude.rollout.harness import harness_command, harness_directory, harness_name
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
