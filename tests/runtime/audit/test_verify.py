# pyright: basic
"""What `etude verify` finds in a whole run directory, changed at random places."""

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.runtime.audit.audit import INVARIANTS, audit
from etude.runtime.audit.doubles import write_run
from etude.runtime.audit.files import NOT_COVERED
from etude.store.local import FileStore


def check(directory, **options):
    return asyncio.run(audit(FileStore(directory), run="run", **options))


def broken(report) -> list[str]:
    return [finding.name for finding in report.findings if finding.violations]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished") / "run"
    directory.mkdir()
    asyncio.run(write_run(directory))
    return directory


def test_every_invariant_holds_for_a_run_that_survived_a_kill_and_something_was_checked(finished):
    report = check(finished)
    assert broken(report) == []
    assert report.state == "sealed"
    assert [finding.name for finding in report.findings] == [invariant.name for invariant in INVARIANTS]
    assert all(finding.checked for finding in report.findings)


def test_tokens_and_tasks_add_up(finished):
    totals = check(finished).totals
    for of_what, whole in (("tokens", "drawn"), ("tasks", "admitted")):
        parts = dict(totals[of_what])
        assert parts.pop(whole) == sum(parts.values()) > 0


def test_nothing_is_written(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    check(finished)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def truncate(data, choice, _others):
    return data[: choice.randrange(len(data))]


def flip(data, choice, _others):
    place = choice.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << choice.randrange(8)]) + data[place + 1 :]


def edit(data, choice, _others):
    place = choice.randrange(len(data))
    return data[:place] + choice.randbytes(choice.randrange(1, 9)) + data[place + choice.randrange(9) :]


def swap(data, choice, others):
    return next((other for other in choice.sample(others, len(others)) if other != data), data)


def delete(_data, _choice, _others):
    return None


@pytest.mark.parametrize("seed", range(8))
def test_no_change_of_any_file_passes_in_silence(finished, tmp_path, seed):
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    seal = check(directory, quick=True).seal
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    covered = [path for path in files if not str(path.relative_to(directory)).startswith(NOT_COVERED)]
    choice = random.Random(seed)
    silent = []
    for number in range(25):
        path, change = choice.choice(covered), choice.choice([truncate, flip, edit, swap, delete])
        data = path.read_bytes()
        alike = [other.read_bytes() for other in covered if other.suffix == path.suffix]
        changed = change(data, choice, alike)
        if changed == data:
            continue
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        if is_silent(directory, seal):
            silent.append((seed, number, change.__name__, str(path)))
        path.write_bytes(data)
    assert silent == []


def is_silent(directory, seal) -> bool:
    try:
        return check(directory, quick=True, seal=seal).holds
    except EtudeError:
        return False
