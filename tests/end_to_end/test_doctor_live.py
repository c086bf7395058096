# pyright: basic
"""A run that goes on, and the same run after it was killed, as a doctor sees them from another process."""

import asyncio
import json
import sys

import pytest
from run_kit import gone, start

pytestmark = pytest.mark.slow


async def asked(directory):
    """Exit code and answer of `etude doctor` on a run."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "etude.cli.main", "doctor", str(directory), "--json"), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return process.returncode, json.loads(output)


async def test_a_live_run_tells_who_waits_for_whom_and_a_killed_one_what_to_do(coin, tmp_path):
    run = tmp_path / "run"
    command = await start("train", coin, run, "trainer.steps=400")
    await command.until_step(1)
    code, live = await asked(run)
    # Of the machine itself it says what is so at this moment, when other tests fill it.
    problems = [finding for finding in live["host"] if finding["state"] == "problem"]
    assert (live["state"], code) == ("live", 4 if problems else 0), live
    assert {finding["name"] for finding in live["findings"]} >= {"controller", "trainer", "sampler exact-0"}
    assert live["waits"]
    assert all(wait["owner"] and wait["name"] and wait["on"] for wait in live["waits"])
    assert all(wait["since"] < wait["until"] for wait in live["waits"])
    command.process.kill()
    await command.process.wait()
    await gone(run)
    code, killed = await asked(run)
    problems = [finding for finding in killed["host"] if finding["state"] == "problem"]
    assert (killed["state"], code) == ("crashed", 4 if problems else 3), killed
    assert killed["next_action"] == "controller: run the same command again: it resumes"
    assert all("runtime/loop_lag_s" in step for step in command.events if step["event"] == "step")
