# pyright: basic
"""Whole runs through the command line, with every process that a user's run has."""

import json
import signal
from collections import Counter

import pytest
from run_kit import gone, processes_of, start

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


async def test_a_run_that_is_killed_goes_on_at_its_checkpoint_to_the_end(coin, tmp_path):
    directory = tmp_path / "run"
    command = await start("run", coin, directory)
    await command.until_step(3)
    assert len(processes_of(directory)) >= 4
    command.process.kill()
    await command.process.wait()
    await gone(directory)

    resumed = await start("run", coin, directory)
    assert await resumed.end() == 0, resumed.errors
    assert resumed.steps == [3, 4, 5, 6]
    await gone(directory)
    check_finished(directory)
    check_steps(rows_of(directory, "train"))

    again = await start("run", coin, directory)
    assert await again.end() == 0, again.errors
    assert not again.steps
    assert "train is done" in again.notes


def check_finished(directory):
    summary = json.loads((directory / "summary.json").read_text())
    assert list(summary["stages"]) == ["eval_before", "train", "eval_after"]
    for when, version in (("before", 0), ("after", STEPS)):
        measured = summary["eval"][when]
        assert (measured["version"], measured["tasks"], measured["attempts"]) == (version, 1, 2)
        assert 0.0 <= measured["pass_rate"] <= 1.0
        assert (directory / f"evals/{version}/report.json").is_file()
    assert [row["version"] for row in rows_of(directory, "eval")] == [0, STEPS]
    assert "<svg" in (directory / "report.html").read_text()


def check_steps(rows):
    assert all({"step", "version", "time", "lineage"} <= row.keys() for row in rows)
    assert all(row["version"] == row["step"] for row in rows)
    assert max(Counter((row["lineage"], row["version"]) for row in rows).values()) == 1
    assert [row["version"] for row in rows[-4:]] == [3, 4, 5, 6]
    assert rows[0]["lineage"] != rows[-1]["lineage"]
    assert 0 <= max(row["staleness/max_versions"] for row in rows) <= MAX_STALENESS
    captured = {value for row in rows for name, value in row.items() if name.startswith("capture/")}
    assert captured == {1.0}
    assert max(row["sampling/tokens_per_s"] for row in rows) > 0.0
    assert sum(row["tokens/trained"] for row in rows) > 0
    assert max(row["sampling/swaps_count/rounded"] for row in rows) > 0


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
