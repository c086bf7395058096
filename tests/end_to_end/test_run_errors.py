# pyright: basic
"""What a user sees when a run cannot go on: one message that says what, where and what to do, and its exit code."""

import json
import os
import shutil
import signal
import subprocess

import pytest
from run_kit import FROM_NOTHING, gone, processes_of, start

from etude.cli.main import main
from etude.telemetry.sink import JsonlSink

pytestmark = pytest.mark.slow


def ended_at_once(capsys, command, recipe, directory, *settings):
    """Exit code and message of a command that ends before it starts a process."""
    overrides = [part for setting in (f"run.url={directory}", *settings) for part in ("--set", setting)]
    code = main([command, str(recipe), *overrides])
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert "starting" not in shown.out
    return code, shown.err


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("policy.path=/nowhere", 2, "policy.path = '/nowhere' has no config.json: name a Hugging Face model directory"),
        ("harness.files=/nowhere", 4, "harness.files = '/nowhere' is not a directory: name the directory"),
        ("tasks.train=/nowhere", 2, "/nowhere: No such file or directory; name a directory of Harbor tasks"),
        ('environment.require=["gpu"]', 4, "not gpu, which environment.require asks for"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(capsys, coin, tmp_path, setting, code, message):
    ended, shown = ended_at_once(capsys, "train", coin, tmp_path / "run", setting)
    assert ended == code
    assert message in shown


def test_a_broken_task_is_named_with_its_file_and_field(capsys, coin, tmp_path):
    shutil.copytree(coin.parent / "tasks/train", tmp_path / "tasks")
    (tmp_path / "tasks/flip-3/task.toml").write_text("schema_version = 7\n")
    code, shown = ended_at_once(capsys, "train", coin, tmp_path / "run", f"tasks.train={tmp_path / 'tasks'}")
    assert code == 2
    assert f"{tmp_path}/tasks/flip-3/task.toml: schema_version" in shown


@pytest.mark.parametrize("command", ["sft", "train", "eval"])
def test_a_stage_without_a_policy_says_what_to_run_first(capsys, tmp_path, command):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(FROM_NOTHING)
    code, shown = ended_at_once(capsys, command, recipe, tmp_path / "run")
    assert code == 2
    assert f"{tmp_path}/run has no policy yet: run etude pretrain and etude sft first, or set policy.path" in shown


def test_a_run_directory_of_another_run_is_left_alone(capsys, coin, from_nothing):
    before = (from_nothing / "run.toml").read_bytes()
    code, shown = ended_at_once(capsys, "train", coin, from_nothing)
    assert code == 2
    assert f"{from_nothing} holds a run with another policy.path, " in shown
    assert "choose another run.url" in shown
    assert (from_nothing / "run.toml").read_bytes() == before


async def test_a_model_that_is_damaged_ends_the_run_with_what_the_trainer_said(coin, from_nothing, tmp_path):
    shutil.copytree(from_nothing / "policy/sft", tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"not weights")
    command = await start("train", coin, tmp_path / "run", f"policy.path={tmp_path / 'model'}")
    assert await command.end() == 2
    assert command.errors.startswith("error: the trainer ended with exit code 2 before it was ready. It said: ")
    assert f"{tmp_path}/model/model.safetensors" in command.errors
    assert f"its log is {tmp_path}/run/logs/trainer.log" in command.errors
    assert command.errors.count("\n") == 1
    await gone(tmp_path / "run")


async def test_a_harness_that_cannot_start_ends_the_run_with_what_it_said(coin, tmp_path):
    command = await start("train", coin, tmp_path / "run", 'harness.command=["frobnicate"]')
    assert await command.end() == 4
    assert command.errors.startswith("error: 16 groups in a row were lost")
    assert "no program 'frobnicate'" in command.errors
    assert "check harness.command and harness.files" in command.errors
    await gone(tmp_path / "run")


async def test_an_evaluation_in_which_the_harness_fails_is_no_pass_rate(coin, tmp_path):
    command = await start("eval", coin, tmp_path / "run", 'harness.command=["frobnicate"]')
    assert await command.end() == 4
    assert command.errors.startswith("error: 2 of 2 attempts failed for reasons that are not the policy's")
    assert "no program 'frobnicate'" in command.errors
    assert not (tmp_path / "run/summary.json").exists()
    done = [event["done"] for event in command.events if event["event"] == "progress"]
    assert max(done) == 2


async def test_a_sampler_that_dies_beyond_its_budget_ends_the_run_with_its_name_and_log(coin, tmp_path):
    command = await start("train", coin, tmp_path / "run", "trainer.steps=200", "supervision.restarts=0")
    await command.until_step(1)
    os.kill(only_process(tmp_path / "run", "--pool rounded"), signal.SIGKILL)
    assert await command.end() == 1
    assert command.errors.startswith("error: the sampler rounded-0 ended with exit code -9 (SIGKILL). It said: ")
    assert f"its log is {tmp_path}/run/logs/sampler-rounded-0.log" in command.errors
    assert "after 0 restarts within 300 s; supervision.restarts allows no more" in command.errors
    await gone(tmp_path / "run")


def only_process(directory, words):
    """The one process of a run whose command line has these words."""
    [found] = [number for number, line in processes_of(directory).items() if words in line]
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_of_two_samplers_that_dies_or_hangs_costs_no_rollout(coin, tmp_path, number):
    run = tmp_path / "run"
    command = await start(
        "train", coin, run, "trainer.steps=16", "supervision.lease_s=2", "supervision.heartbeat_s=0.2"
    )
    await command.until_step(1)
    victim = only_process(run, "--pool rounded")
    os.kill(victim, number)
    assert await command.end() == 0, command.errors
    assert command.steps[-1] == 16
    steps = [event for event in command.events if event["event"] == "step" and event["step"] > 1]
    assert (
        sum(step.get("rollout/infra_errors_count", 0) + step.get("rollout/groups_lost_count", 0) for step in steps) == 0
    )
    lease = json.loads((run / "services/rounded-0.json").read_text())
    assert lease["restarts"] == 1
    assert lease["pid"] != victim
    assert "the sampler rounded-0 " in command.notes
    await gone(run)


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds the first step of a run and little more."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "none", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def enlarge(place):
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)


async def test_a_full_disk_ends_the_run_which_resumes_when_there_is_space(coin, small_disk):
    run = small_disk / "run"
    command = await start("train", coin, run, "trainer.steps=200")
    assert await command.end() == 4, command.errors
    assert "free some space and run the same command again" in command.errors
    assert command.errors.count("\n") == 1
    await gone(run)
    enlarge(small_disk)
    steps = command.steps[-1] + 1
    resumed = await start("train", coin, run, f"trainer.steps={steps}")
    assert await resumed.end() == 0, resumed.errors
    assert resumed.steps[-1] == steps


def test_two_commands_on_one_run_directory_are_refused(capsys, coin, tmp_path):
    other = JsonlSink(tmp_path / "run/metrics.jsonl")
    code, shown = ended_at_once(capsys, "train", coin, tmp_path / "run")
    other.close()
    assert code == 4
    assert "another process writes metrics to" in shown
    assert not (tmp_path / "run/run.toml").exists()


def test_pretraining_onto_a_full_disk_names_the_file(tmp_path, small_disk):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(FROM_NOTHING)
    (small_disk / "ballast").write_bytes(bytes(800 << 10))
    assert main(["pretrain", str(recipe), "--set", f"run.url={small_disk}/run"]) == 4
