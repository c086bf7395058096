# pyright: basic
"""What ails a machine or a run is found from outside, with the next thing to do."""

import asyncio
import json
import os
import subprocess
import sys

import msgspec
import pytest

from etude.cli.main import main
from etude.errors import StoreError
from etude.runtime.directory import RunDirectory
from etude.runtime.doctor import diagnose_run
from etude.runtime.host_checks import State, check_host
from etude.runtime.services import CONTROLLER_KEY, ControllerState, Lease, lease_key, this_host
from etude.telemetry.waits import Wait

NOW = 1_000_000.0


def controller(**changes):
    state = ControllerState(
        pid=os.getpid(), host=this_host(), started=NOW - 500, beat=NOW - 0.5, written=NOW - 0.4, stage="train"
    )
    return msgspec.structs.replace(state, **changes)


def lease(**changes):
    made = Lease(
        name="trainer",
        kind="trainer",
        pid=os.getpid(),
        host=this_host(),
        url="http://127.0.0.1:1",
        writer="trainer-1",
        started=NOW - 400,
        expires=NOW + 20,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def dead():
    """The id of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def sound_host(_place):
    return []


def diagnosis(tmp_path, state=None, *leases):
    (tmp_path / "run.toml").write_text("")
    directory = RunDirectory.open(str(tmp_path))

    async def look():
        if state is not None:
            await directory.store.put(CONTROLLER_KEY, msgspec.json.encode(state))
        for one in leases:
            await directory.store.put(lease_key(one.name), msgspec.json.encode(one))
        return await diagnose_run(directory, now=NOW, check=sound_host)

    return asyncio.run(look())


def problems(found):
    return [finding for finding in found.findings if finding.state is State.PROBLEM]


async def test_everything_that_a_run_needs_of_a_machine_is_looked_at(tmp_path):
    findings = await check_host(tmp_path / "not" / "there" / "yet")
    names = {finding.name for finding in findings}
    assert names >= {"python", "ports", "disk", "memory", "open files", "sandboxes"}
    assert all(finding.action for finding in findings if finding.state is State.PROBLEM)


def test_of_a_live_run_it_tells_who_waits_for_whom_and_points_at_what_takes_long(tmp_path):
    long = Wait(name="a group", owner="train", on="rollouts", since=NOW - 300, until=NOW + 100)
    short = Wait(name="a slot", owner="admit", on="trainer", since=NOW - 3, until=NOW + 900)
    found = diagnosis(tmp_path, controller(waits=(short, long)), lease())
    assert (found.state, found.waits) == ("live", (long, short))
    assert found.is_run_well
    [warning] = [finding for finding in found.findings if finding.state is State.WARNING]
    assert warning.detail == "train has waited 5 min for a group on rollouts"
    assert found.next_action == "wait: look at rollouts; the run ends with this name in 100 s"


def test_a_live_run_that_is_well_needs_nothing(tmp_path):
    found = diagnosis(tmp_path, controller(), lease())
    assert (found.state, found.is_run_well, found.next_action) == ("live", True, "nothing: the run goes on")


def test_a_loop_that_stands_still_is_a_problem_with_its_place(tmp_path):
    found = diagnosis(tmp_path, controller(beat=NOW - 40, blocked_in="grade.py:7 parse"))
    [problem] = problems(found)
    assert problem.detail == "its event loop has stood still for 40 s, in grade.py:7 parse"


def test_a_controller_that_lives_but_writes_no_more_is_a_problem(tmp_path):
    [problem] = problems(diagnosis(tmp_path, controller(beat=NOW - 300, written=NOW - 300)))
    assert "lives but has not written for 5 min" in problem.detail
    assert f"kill -CONT {os.getpid()}" in problem.action


def test_a_run_whose_controller_died_says_so_with_the_last_words_of_its_processes(tmp_path, dead):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/trainer.log").write_text("loading\nerror: out of memory\n")
    found = diagnosis(tmp_path, controller(pid=dead), lease())
    assert (found.state, found.is_run_well) == ("crashed", False)
    assert found.next_action == "controller: run the same command again: it resumes"
    details = {finding.name: finding.detail for finding in found.findings}
    assert details["trainer.log"] == "error: out of memory"
    assert "outlives its controller" in details["trainer"]


def test_a_controller_elsewhere_that_is_not_heard_of_is_taken_for_dead(tmp_path):
    assert diagnosis(tmp_path, controller(host="elsewhere", written=NOW - 60)).state == "crashed"
    assert diagnosis(tmp_path, controller(host="elsewhere")).state == "live"


def test_a_run_that_ended_says_how(tmp_path):
    assert diagnosis(tmp_path, controller(ended=NOW - 9)).next_action == f"etude status {tmp_path}"
    found = diagnosis(tmp_path, controller(ended=NOW - 9, error="RunError: the trainer broke down"))
    assert found.state == "failed"
    assert problems(found)[0].detail == "ended: RunError: the trainer broke down"


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"expires": NOW - 50}, State.PROBLEM, "its lease ran out 50 s ago"),
        (
            {"ended": NOW - 4, "reason": "ended with exit code 1"},
            State.WARNING,
            "ended 4 s ago: ended with exit code 1",
        ),
        ({"restarts": 2}, State.WARNING, "started 2 times again"),
        ({"pid": None}, State.WARNING, "is dead"),
    ],
)
def test_a_process_that_is_not_well_is_named(tmp_path, dead, changes, state, words):
    changes = {name: dead if value is None else value for name, value in changes.items()}
    found = diagnosis(tmp_path, controller(), lease(**changes))
    [finding] = [finding for finding in found.findings if finding.name == "trainer"]
    assert finding.state is state
    assert words in finding.detail


def test_what_is_damaged_is_said_and_the_rest_is_looked_at(tmp_path):
    (tmp_path / "services").mkdir()
    (tmp_path / "services/controller.json").write_text("{")
    (tmp_path / "services/trainer.json").write_text("[]")
    found = diagnosis(tmp_path)
    assert [finding.name for finding in found.findings if "is damaged" in finding.detail] == ["controller", "leases"]


def test_a_directory_without_a_run_is_refused_and_stays_as_it_was(tmp_path):
    with pytest.raises(StoreError, match="there is no run at"):
        asyncio.run(diagnose_run(RunDirectory.open(str(tmp_path)), now=NOW))
    assert main(["doctor", str(tmp_path / "nowhere")]) == 4
    assert not (tmp_path / "nowhere").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_what_it_found(tmp_path, capsys, dead):
    host = main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["host"]
    diagnosis(tmp_path, controller(pid=dead))
    assert main(["doctor", str(tmp_path)]) == (host or 3)
    shown = capsys.readouterr().out
    assert shown.startswith(f"run {tmp_path} is crashed\n")
    assert shown.endswith("next: controller: run the same command again: it resumes\n")
