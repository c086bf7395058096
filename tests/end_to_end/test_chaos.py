# pyright: basic
"""A run under attack from outside, as `etude chaos` attacks it; `ETUDE_CHAOS_KILLS=50` attacks more often."""

import json
import os
import subprocess
import sys

import pytest

from etude.cli.main import main

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("ETUDE_CHAOS_KILLS", "5"))


def attacked(capsys, recipe, directory, *arguments) -> dict:
    settings = (f"run.url={directory}", f"trainer.steps={6 + KILLS}")
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert main(["chaos", str(recipe), "--json", "--pause", "0.5", *arguments, *overrides]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_whose_every_service_is_killed_is_finished_and_verified(capsys, coin, tmp_path):
    report = attacked(capsys, coin, tmp_path / "run", "--kills", str(KILLS), "--seed", "1")
    assert sum(report["chaos"]["kills"].values()) == KILLS
    assert report["chaos"]["kills"].keys() == {"controller", "trainer", "sampler", "launcher", "sandbox"}
    assert report["verify"]["state"] == "sealed"
    assert not [finding for finding in report["verify"]["findings"] if finding["violations"]]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["stages"].keys() == {"eval_before", "train", "eval_after"}


def test_a_run_on_a_store_that_fails_a_tenth_of_its_calls_is_finished_and_verified(capsys, coin, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = attacked(capsys, coin, tmp_path / "run", "--kills", "1", "--seed", "2", "--store-failures", "0.1")
    assert report["verify"]["state"] == "sealed"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_run_whose_disk_is_full_for_a_while_is_finished_and_verified(coin, tmp_path):
    directory = tmp_path / "run"
    arguments = ["--kills", "0", "--full-disks", "1", "--seed", "3", "--pause", "0.5", "--set", f"run.url={directory}"]
    # In a process of its own, for it leaves the mount namespace of this one.
    command = [sys.executable, "-m", "etude.cli.main", "chaos", str(coin), *arguments, "--set", "trainer.steps=12"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "filled the disk 1 times" in done.stdout
    assert json.loads((directory / "summary.json").read_text())["stages"].keys() == {
        "eval_before",
        "train",
        "eval_after",
    }
