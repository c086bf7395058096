"""Promises of the harness's files and command."""

from pathlib import Path

import pytest

from etude.config import HarnessSection
from etude.errors import HarnessError
from etude.rollout.harness import load_harness
from etude.types import Task


def test_a_directory_is_placed_whole_without_links_and_keeps_what_is_executable(tmp_path: Path):
    root = tmp_path / "agent"
    (root / "lib").mkdir(parents=True)
    (root / "run").write_bytes(b"#!/bin/sh")
    (root / "run").chmod(0o755)
    (root / "lib" / "a.py").write_bytes(b"pass")
    (root / "secret").symlink_to("/etc/passwd")
    harness = load_harness(HarnessSection(files=str(root), command=("/opt/harness/run", "--task={instruction}")))
    assert harness.files == {"/opt/harness/lib/a.py": b"pass", "/opt/harness/run": b"#!/bin/sh"}
    assert harness.executable == {"/opt/harness/run"}
    assert harness.name == "agent"


def test_the_instruction_is_one_argument_whatever_is_in_it(tmp_path: Path):
    task = Task(task_id="t", path="/tasks/t", digest="d", instruction="a b; {instruction}")
    harness = load_harness(HarnessSection(files=str(tmp_path), command=("agent", "{instruction}", "--fast")))
    assert harness.command_for(task) == ("agent", "a b; {instruction}", "--fast")


def test_a_missing_directory_is_refused_with_its_setting(tmp_path: Path):
    with pytest.raises(HarnessError, match=r"harness\.files = .*nowhere"):
        load_harness(HarnessSection(files=str(tmp_path / "nowhere")))
