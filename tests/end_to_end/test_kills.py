# pyright: basic, reportAttributeAccessIssue=false
"""Runs whose processes are killed at random points.

`ETUDE_KILLS=20` kills more often, `ETUDE_SEEDS=3` in more ways, `ETUDE_TRAINER_DOWN_S=60` keeps a trainer
away for longer.
"""

import asyncio
import os
import random
import signal
from collections import Counter

import pytest
from run_kit import gone, processes_of, start

from etude.cli.main import main
from etude.runtime.journal import read_log
from etude.runtime.run_state import RunState, fold
from etude.store.ledger_format import read_run_id
from etude.store.ledger_reader import read_writer, writers
from etude.store.local import FileStore
from etude.telemetry.events import (
    Admitted,
    GroupLost,
    GroupReady,
    LineageOpened,
    Published,
    Resumed,
    RolloutEnded,
    ServiceEnded,
    ServiceStarted,
    Trained,
)

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("ETUDE_KILLS", "2"))
TRAINER_DOWN_S = float(os.environ.get("ETUDE_TRAINER_DOWN_S", "3"))
STEPS = max(6, KILLS + 2)
"""Each life makes one at least, if it is not killed while it starts."""
DETERMINISTIC = ("run.deterministic=true", "rollout.max_staleness=0")


@pytest.fixture(scope="module")
def one_sampler(coin):
    """The recipe with one sampler, trained for nothing else."""
    recipe = coin.with_name("one.toml")
    text = coin.read_text().replace('[[pools]]\nname = "rounded"\nview = "fp8"\n', "")
    recipe.write_text(text.replace('stages = ["eval", "train", "eval"]', 'stages = ["train"]'))
    return recipe


async def killed_at_random(recipe, directory, seed, *settings):
    """Run to the end, killed now and then: soon after a step, or while it starts."""
    choice = random.Random(seed)
    step = 0
    for _ in range(KILLS):
        command = await start("run", recipe, directory, *settings)
        try:
            async with asyncio.timeout(choice.uniform(0.0, 12.0) if choice.random() < 0.3 else None):
                await command.until(event="step")
            step = command.steps[-1]
            async with asyncio.timeout(choice.uniform(0.0, 1.0)):
                await command.until(event="step", step=STEPS)
                break
        except TimeoutError:
            pass
        command.process.kill()
        await command.process.wait()
        await gone(directory)
        if step >= STEPS:
            break
    last = await start("run", recipe, directory, *settings)
    assert await last.end() == 0, last.errors
    await gone(directory)


async def facts_of(directory):
    """All facts of the controllers, in order, and those of every other process."""
    store = FileStore(directory)
    controllers = [fact async for fact in (await read_log(store, await read_run_id(store))).facts()]
    others = []
    for writer in await writers(store):
        if not writer.startswith("controller-"):
            async for batch in read_writer(store, writer):
                others += batch
    return controllers, others


def of(kind, facts):
    return [fact for fact in facts if isinstance(fact, kind)]


def assert_conserved(controllers, others):
    """Every ticket is trained once, lost with a reason, or still open; the trainer trained on just that."""
    state = fold(RunState(), controllers)
    steps = fold(RunState(), [fact for fact in controllers if type(fact).__name__ != "CheckpointDeleted"]).steps
    trained = Counter(ticket.number for step in steps for ticket in step.tickets)
    assert set(trained.values()) == {1}
    open_ = {ticket.number for ticket in (*state.in_flight, *state.finished, *state.taken)}
    admitted = [fact.ticket for fact in of(Admitted, controllers)]
    assert len(admitted) == len(set(admitted)) == len(trained) + len(open_) + sum(state.lost.values())
    assert trained.keys().isdisjoint(open_)
    for step in steps:
        first, *again = [fact.groups for fact in of(Trained, others) if fact.version == step.version]
        assert [group.group for group in first] == [ticket.group_id for ticket in step.tickets]
        assert all(groups == first for groups in again)


@pytest.mark.parametrize("seed", range(int(os.environ.get("ETUDE_SEEDS", "1"))))
async def test_each_admitted_group_is_trained_once_however_often_the_run_is_killed(coin, tmp_path, seed):
    directory = tmp_path / "run"
    await killed_at_random(coin, directory, seed, 'stages=["train"]', f"trainer.steps={STEPS}")
    controllers, others = await facts_of(directory)
    assert_conserved(controllers, others)
    assert await asyncio.to_thread(main, ["verify", str(directory)]) == 0
    assert fold(RunState(), controllers).version == STEPS
    assert len(of(LineageOpened, controllers)) == 1
    # Tasks are given out in the order of one source, across all crashes.
    tasks = [fact.task for fact in of(Admitted, controllers)]
    assert all(len(set(tasks[first : first + 6])) == 6 for first in range(0, len(tasks) - 5, 6))


async def test_a_run_that_is_killed_ends_with_the_very_weights_of_one_that_is_not(one_sampler, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # Checkpoints that are rare enough for steps to be repeated.
    settings = (*DETERMINISTIC, f"trainer.steps={STEPS}", "checkpoint.every=4")
    command = await start("run", one_sampler, whole, *settings)
    assert await command.end() == 0, command.errors
    await killed_at_random(one_sampler, killed, 7, *settings)
    expected, found = [
        {fact.version: fact.digest for fact in of(Published, (await facts_of(directory))[1])}
        for directory in (whole, killed)
    ]
    assert expected.keys() == set(range(STEPS + 1))
    assert found == expected
    assert len(set(expected.values())) == STEPS + 1


async def test_a_trainer_that_dies_is_brought_back_while_rollouts_go_on(coin, tmp_path):
    directory = tmp_path / "run"
    command = await start("run", coin, directory, 'stages=["train"]', f"trainer.steps={STEPS}", "checkpoint.every=4")
    for step in (1, 3):
        await command.until_step(step)
        [trainer] = [pid for pid, line in processes_of(directory).items() if "serve-trainer" in line]
        os.kill(trainer, signal.SIGKILL)
    assert await command.end() == 0, command.errors
    assert command.steps == list(range(1, STEPS + 1))
    controllers, others = await facts_of(directory)
    assert_conserved(controllers, others)
    assert await asyncio.to_thread(main, ["verify", str(directory)]) == 0
    assert not of(Resumed, controllers)
    assert len(of(LineageOpened, controllers)) == 1
    assert "the trainer is back at version" in command.notes
    await gone(directory)


async def test_while_the_trainer_is_away_groups_are_played_until_every_slot_is_taken(coin, tmp_path):
    directory = tmp_path / "run"
    away = (f"supervision.backoff_s={TRAINER_DOWN_S}", "supervision.lease_s=5")
    command = await start("run", coin, directory, 'stages=["train"]', f"trainer.steps={STEPS}", *away)
    await command.until_step(2)
    [trainer] = [pid for pid, line in processes_of(directory).items() if "serve-trainer" in line]
    os.kill(trainer, signal.SIGKILL)
    assert await command.end() == 0, command.errors
    await gone(directory)
    controllers, others = await facts_of(directory)
    assert_conserved(controllers, others)
    assert not of(GroupLost, controllers)
    assert {fact.outcome for fact in of(RolloutEnded, controllers)} <= {"scored", "cancelled"}
    lives = [fact for fact in controllers if getattr(fact, "service", "") == "trainer"]
    died = controllers.index(next(fact for fact in of(ServiceEnded, lives) if fact.reason))
    came_back = controllers.index(of(ServiceStarted, lives)[1])
    assert controllers[came_back].t - controllers[died].t >= TRAINER_DOWN_S
    before = fold(RunState(), controllers[:died])
    meanwhile = fold(RunState(), controllers[:came_back])
    assert of(GroupReady, controllers[died:came_back])
    # Every slot but those of groups in steps that samplers do not serve yet holds a finished group: none is played.
    assert not meanwhile.in_flight
    assert len(meanwhile.finished) + len(meanwhile.taken) >= len(before.finished) + len(before.taken)
    assert await asyncio.to_thread(main, ["verify", str(directory)]) == 0
