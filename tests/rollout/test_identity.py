"""Promises of what a rollout says about its harness."""

from pathlib import Path

import pytest

from etude.config import HarnessSection
from etude.errors import HarnessError
from etude.rollout.identity import HarnessIdentity, identify


def program(directory: Path, facts: str = '{"name": "my-agent", "version": "1.2.0"}') -> HarnessSection:
    (directory / "lib").mkdir(parents=True)
    (directory / "harness.json").write_text(facts)
    (directory / "agent.py").write_text("print()\n")
    (directory / "lib" / "tools.py").write_text("")
    (directory / "lib" / "link").symlink_to("tools.py")
    return HarnessSection(files=str(directory))


def test_name_and_version_are_those_that_the_directory_states(tmp_path: Path):
    found = identify(program(tmp_path / "dir"))
    assert (found.name, found.version, len(found.config_hash)) == ("my-agent", "1.2.0", 64)
    (tmp_path / "dir/harness.json").unlink()
    found = identify(HarnessSection(files=str(tmp_path / "dir")))
    assert (found.name, found.version) == ("dir", "unknown")
    assert (identify(HarnessSection()).name, identify(HarnessSection()).version != "unknown") == ("mini", True)


def test_the_same_program_has_the_same_hash_wherever_it_lies(tmp_path: Path):
    first, second = (identify(program(tmp_path / name)) for name in ("one", "two"))
    assert first == second
    (tmp_path / "two/lib/__pycache__").mkdir()
    (tmp_path / "two/lib/__pycache__/tools.pyc").write_bytes(b"of one machine")
    assert identify(HarnessSection(files=str(tmp_path / "two"))) == first


def test_any_change_of_program_or_configuration_changes_the_hash(tmp_path: Path):
    section = program(tmp_path)
    seen: list[HarnessIdentity] = [identify(section)]
    (tmp_path / "lib/tools.py").write_text("x")
    seen.append(identify(section))
    (tmp_path / "agent.py").chmod(0o755)
    seen.append(identify(section))
    (tmp_path / "lib/link").unlink()
    seen.append(identify(section))
    (tmp_path / "lib/link").symlink_to("/etc")
    seen.append(identify(section))
    seen.append(identify(section.model_copy(update={"max_calls": 3})))
    seen.append(identify(section.model_copy(update={"env": {"A": "b"}})))
    assert len({found.config_hash for found in seen}) == len(seen)


@pytest.mark.parametrize("facts", ["{", "[]", '{"name": 1, "version": "1"}', '{"name": "a"}'])
def test_malformed_facts_are_refused_with_their_file(tmp_path: Path, facts: str):
    with pytest.raises(HarnessError, match=r"harness\.json.*must look like"):
        identify(program(tmp_path / "dir", facts))
