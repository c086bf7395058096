# pyright: basic, reportArgumentType=false
"""Runs that the failure tests look at: one that nobody disturbed, and one that was killed again and again."""

import asyncio
import os
import random
from pathlib import Path

import pytest
from failure_kit import until
from run_kit import gone, processes_of, start

from etude.runtime.journal import read_log
from etude.runtime.run_state import RunState, fold
from etude.store.ledger_format import read_run_id
from etude.store.ledger_reader import read_writer, writers
from etude.store.local import FileStore
from etude.tasks.harbor import load_tasks
from etude.tasks.source import SeededTaskSource
from etude.telemetry.events import Admitted, Resumed

KILLS = int(os.environ.get("ETUDE_KILLS", "3"))
"""`kill -9` at random places of one run; `make nightly` asks for more."""
STEPS = 6 + KILLS // 2
KEEP = 2


@pytest.fixture(scope="session")
def finished(coin, tmp_path_factory) -> Path:
    """The directory of an asynchronous run that was never disturbed."""
    directory = tmp_path_factory.mktemp("finished") / "run"

    async def play() -> None:
        command = await start("run", coin, directory)
        assert await command.end() == 0, command.errors

    asyncio.run(play())
    return directory


class Disturbed:
    """A run that was killed, resumed to its end, and resumed once more."""

    kills, steps, keep = KILLS, STEPS, KEEP

    def __init__(self, directory, facts, order, again, sampler_lives):
        self.directory, self.facts, self.order = directory, facts, order
        """Facts of its controllers, and the tasks in the order in which they are to be admitted."""
        self.state = fold(RunState(), facts)
        self.again = again
        """The command on the finished run."""
        self.sampler_lives = sampler_lives
        """Facts of every life of every sampler."""

    def of(self, kind):
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def after_resumes(self):
        """Yield, for each resume, the facts before it and after it."""
        for place, fact in enumerate(self.facts):
            if isinstance(fact, Resumed):
                yield self.facts[:place], self.facts[place:]


def num_groups(directory):
    return sum(1 for _ in (directory / "groups").glob("*/*.parquet"))


async def kill_somewhere(command, directory, chance, goal):
    """Kill a process of a run, in the end the one that controls it, once it has finished so many groups."""

    async def far_enough():
        begun = any((directory / "ledger").glob("controller-*/*"))
        return (begun and num_groups(directory) >= goal) or command.process.returncode is not None

    draining = asyncio.create_task(command.end())
    await until(far_enough, within_s=300)
    children = [number for number, line in processes_of(directory).items() if "serve-" in line]
    if children and chance.random() < 0.3:
        os.kill(chance.choice(children), 9)
        goal += 1
        await until(far_enough, within_s=300)
    if command.process.returncode is None:
        command.process.kill()
    await draining
    await gone(directory)


async def controller_facts(store):
    log = await read_log(store, await read_run_id(store))
    return [fact async for fact in log.facts()]


async def facts_of(store, writer):
    return [fact async for batch in read_writer(store, writer) for fact in batch]


@pytest.fixture(scope="session")
def disturbed(coin, tmp_path_factory) -> Disturbed:
    directory = tmp_path_factory.mktemp("disturbed") / "run"
    chance = random.Random(7)

    async def play():
        settings = (f"trainer.steps={STEPS}", f"checkpoint.keep={KEEP}", "supervision.backoff_s=0.1")
        for number in range(KILLS):
            command = await start("train", coin, directory, *settings)
            # First before anything is drawn: a resume must not need a batch to begin with. Then when one of the two
            # groups of a step is there, then at such a place or a step later.
            more = (0, 1)[number] if number < 2 else chance.choice((1, 3))
            goal = num_groups(directory) // 2 * 2 + more
            await kill_somewhere(command, directory, chance, goal)
        command = await start("train", coin, directory, *settings)
        assert await command.end() == 0, command.errors
        again = await start("train", coin, directory, *settings)
        assert await again.end() == 0, again.errors
        store = FileStore(directory)
        facts = await controller_facts(store)
        source = SeededTaskSource(load_tasks(coin.parent / "tasks/train"), seed=0)
        order = [source.next_task().task_id for _ in range(sum(isinstance(fact, Admitted) for fact in facts))]
        samplers = [await facts_of(store, name) for name in await writers(store) if name.startswith(("exact", "round"))]
        return Disturbed(directory, facts, order, again, samplers)

    return asyncio.run(play())
