# pyright: basic
"""Whole runs through the command line, with every process that a user's run has."""

import asyncio
import json
import signal

import pytest
from run_kit import gone, processes_of, start

from etude.cli.main import main

pytestmark = pytest.mark.slow

STEPS, MAX_STALENESS = 6, 1


def rows_of(directory, stage):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["stage"] == stage]


def test_a_policy_is_made_from_nothing_and_measured(from_nothing):
    summary = json.loads((from_nothing / "summary.json").read_text())
    assert list(summary["stages"]) == ["pretrain", "sft", "eval_before"]
    assert summary["seconds"] == pytest.approx(sum(summary["stages"].values()), abs=0.01)
    for stage in ("pretrain", "sft"):
        rows = rows_of(from_nothing, stage)
        assert rows
        assert all({"step", "version", "time", f"{stage}/loss"} <= row.keys() for row in rows)
        assert (from_nothing / f"policy/{stage}/model.safetensors").is_file()
    assert summary["eval"]["before"]["tasks"] == 2
    assert (from_nothing / "report.html").is_file()


@pytest.fixture(scope="module")
def killed_and_finished(coin, tmp_path_factory):
    """A run that was killed after its third step and run again to its end, with the steps of the second time."""
    directory = tmp_path_factory.mktemp("killed") / "run"

    async def play():
        command = await start("run", coin, directory)
        await command.until_step(3)
        assert len(processes_of(directory)) >= 4
        command.process.kill()
        await command.process.wait()
        await gone(directory)
        resumed = await start("run", coin, directory)
        assert await resumed.end() == 0, resumed.errors
        await gone(directory)
        return resumed.steps

    return directory, asyncio.run(play())


def test_a_run_that_is_killed_goes_on_where_it_was_to_the_end(killed_and_finished):
    directory, steps = killed_and_finished
    assert steps == list(range(steps[0], STEPS + 1))
    assert steps[0] > 3
    summary = json.loads((directory / "summary.json").read_text())
    assert list(summary["stages"]) == ["eval_before", "train", "eval_after"]
    for when, version in (("before", 0), ("after", STEPS)):
        measured = summary["eval"][when]
        assert (measured["version"], measured["tasks"], measured["attempts"]) == (version, 1, 2)
        assert 0.0 <= measured["pass_rate"] <= 1.0
        assert (directory / f"evals/{version}/report.json").is_file()
    assert [row["version"] for row in rows_of(directory, "eval")][:2] == [0, STEPS]
    assert "<svg" in (directory / "report.html").read_text()


def test_a_run_that_was_killed_and_finished_is_what_it_claims(killed_and_finished, capsys):
    assert main(["verify", str(killed_and_finished[0]), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["state"] == "sealed"
    assert said["totals"]["tasks"]["trained"] == 2 * STEPS
    assert all(finding["checked"] for finding in said["findings"])


def test_versions_grow_by_one_and_each_is_made_once(killed_and_finished):
    rows = rows_of(killed_and_finished[0], "train")
    assert all({"step", "version", "time", "lineage"} <= row.keys() for row in rows)
    assert [row["version"] for row in rows] == [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len({row["lineage"] for row in rows}) == 1


def test_staleness_is_bounded_and_everything_about_each_drawn_token_arrives(killed_and_finished):
    rows = rows_of(killed_and_finished[0], "train")
    assert 0 <= max(row["staleness/max_versions"] for row in rows) <= MAX_STALENESS
    captured = {name: row[name] for row in rows for name in row if name.startswith("capture/")}
    assert captured == dict.fromkeys([f"capture/{what}_fraction" for what in ("version", "support", "experts")], 1.0)
    assert max(row["sampling/tokens_per_s"] for row in rows) > 0.0
    assert sum(row["tokens/trained"] for row in rows) > 0
    assert max(row["sampling/swaps_count/rounded"] for row in rows) > 0


async def test_a_finished_run_takes_no_step_more(killed_and_finished, coin):
    again = await start("run", coin, killed_and_finished[0])
    assert await again.end() == 0, again.errors
    assert not again.steps
    assert "train is done" in again.notes


async def test_a_finished_run_can_be_measured_again(killed_and_finished, coin):
    directory, _ = killed_and_finished
    command = await start("eval", coin, directory, "eval.attempts=3")
    assert await command.end() == 0, command.errors
    assert f"version {STEPS} passes" in command.notes
    assert json.loads((directory / "summary.json").read_text())["eval"]["after"]["attempts"] == 3
    await gone(directory)


def test_a_finished_run_is_told_and_shown(killed_and_finished, capsys):
    run = str(killed_and_finished[0])
    assert main(["status", run, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["version"], status["steps"], status["unreadable"]) == (STEPS, STEPS, [])
    assert main(["status", run]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["show", run, "--json", "--last", "999"]) == 0
    rollouts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    trained = [rollout["name"] for rollout in rollouts if rollout["name"].startswith("g0")]
    assert len(trained) >= STEPS * 2 * 4
    assert main(["show", run, trained[0]]) == 0
    assert "Say flip-" in capsys.readouterr().out
    assert main(["show", run, trained[0], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"].startswith("ATIF")
    assert document["steps"][1]["source"] == "agent"


async def test_ctrl_c_drains_and_the_same_command_resumes(coin, tmp_path):
    directory = tmp_path / "run"
    command = await start("train", coin, directory)
    await command.until_step(1)
    command.process.send_signal(signal.SIGINT)
    assert await command.end() == 130, command.errors
    assert f"run the same command again to resume {directory}" in command.notes
    assert not command.errors
    done = command.steps[-1] if command.steps else 1
    assert done < STEPS
    await gone(directory)

    resumed = await start("train", coin, directory)
    assert await resumed.end() == 0, resumed.errors
    assert resumed.steps == list(range(done + 1, STEPS + 1))
    assert len({row["lineage"] for row in rows_of(directory, "train")}) == 1
    await gone(directory)


async def test_ctrl_c_ends_pretraining_at_once_and_leaves_no_half_policy(from_nothing, tmp_path):
    recipe = from_nothing.parent / "recipe.toml"
    command = await start("pretrain", recipe, tmp_path / "run", "pretrain.tokens=400_000")
    await command.until(event="progress", label="pretrain")
    command.process.send_signal(signal.SIGINT)
    assert await command.end() == 130, command.errors
    assert "run the same command again to resume" in command.notes
    assert not command.errors
    assert command.events[-2]["done"] < command.events[-2]["total"]
    assert not (tmp_path / "run/policy/pretrain").exists()
