# pyright: basic, reportArgumentType=false
"""Groups that are too old, and groups that are thrown away for it."""

import asyncio
import math
from itertools import count

import pytest
from failure_kit import task

from etude.algorithm.staleness import group_staleness
from etude.config import RunConfig
from etude.rollout.buffer import SlotBuffer, Ticket
from etude.rollout.doubles import ScriptedPlayer
from etude.rollout.group import GroupPlan
from etude.rollout.worker import RolloutWorker
from etude.telemetry.metrics import METRICS
from etude.types import Completion, Edge, FinishReason, Group, Node, Outcome, Trajectory, VersionRun

WAITS = {
    "P-68": "planner: it predicts what asynchrony gains before a run starts; until then results.md has measurements"
}

GROUPS_PER_STEP, STEPS = 2, 30
SLOW_EVERY = 4
"""One task in so many takes as long as many steps."""


class Endless:
    """Tasks t0, t1, ..."""

    def __init__(self):
        self._numbers = count()

    def next_task(self):
        return task(f"t{next(self._numbers)}")

    def cursor(self):
        return b""

    def restore(self, cursor):
        pass


class Discarding:
    """The mistake: a queue that plays whatever there is, and at the trainer's door drops what has become too old."""

    def __init__(self, *, max_staleness, places=6):
        self.groups_per_step, self.max_staleness = GROUPS_PER_STEP, max_staleness
        self.version, self.in_flight, self.dropped = 0, (), []
        self.places, self.ready, self.numbers = asyncio.Semaphore(places), asyncio.Queue(), count()

    async def wait_for_slot(self):
        await self.places.acquire()

    def admit(self, task_id):
        return Ticket(number=next(self.numbers), task_id=task_id, admitted_version=self.version)

    def finish(self, ticket, group):
        self.ready.put_nowait(group)

    async def take(self, version):
        while True:
            group = await self.ready.get()
            self.places.release()
            if version - group.admitted_version <= self.max_staleness:
                return group
            self.dropped.append(group.task_id)

    def trained(self, version):
        self.version = version

    def served(self, version):
        pass


def is_slow(task_id):
    return int(task_id[1:]) % SLOW_EVERY == 0


async def train(buffer):
    """Return every trained group with its staleness; a slow task takes as long as about ten steps do."""

    def script(task, _index, _attempt):
        return Outcome.SCORED, 1.0, 120 if is_slow(task.task_id) else 1

    plan = GroupPlan(seed=0, size=2, min_survivors=2, retries=0)
    worker = RolloutWorker(player=ScriptedPlayer(script), buffer=buffer, plan=plan, concurrency=100)
    seen = []
    async with asyncio.timeout(20), asyncio.TaskGroup() as loops:
        loops.create_task(worker.run(Endless()))
        for version in range(STEPS):
            for _ in range(GROUPS_PER_STEP):
                group = await buffer.take(version)
                seen.append((group.task_id, version - group.admitted_version))
            buffer.trained(version + 1)
            buffer.served(version + 1)
        worker.stop()
    return seen


@pytest.mark.row("P-65")
@pytest.mark.parametrize("max_staleness", [0, 3])
async def test_no_group_is_discarded_for_its_age_synchronous_or_not(max_staleness):
    """Admission bounds staleness, so every admitted group is trained on, the slow ones too; losses have a reason."""
    wasteful = Discarding(max_staleness=3)
    await train(wasteful)
    assert len(wasteful.dropped) > STEPS * GROUPS_PER_STEP / 20
    assert all(map(is_slow, wasteful.dropped))

    buffer = SlotBuffer(groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)
    seen = [task_id for task_id, _ in await train(buffer)]
    assert buffer.lost == {}
    admitted = {f"t{number}" for number in range(buffer.state().next_number)}
    unfinished = {ticket.task_id for ticket in (*buffer.state().in_flight, *buffer.state().finished)}
    assert sorted(seen) == sorted(admitted - unfinished)
    assert sum(map(is_slow, seen)) >= len(seen) / SLOW_EVERY - buffer.num_slots


@pytest.mark.row("P-66")
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_versions_between_drawing_and_training_are_bounded(max_staleness):
    """However late a group is finished, no older weights than `max_staleness` versions are trained on."""
    assert max(staleness for _, staleness in await train(Discarding(max_staleness=math.inf))) > 4
    buffer = SlotBuffer(groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)
    assert max(staleness for _, staleness in await train(buffer)) <= max_staleness


def drawn_under(*versions):
    completion = Completion(
        token_ids=tuple(range(len(versions))),
        sampler_logprobs=b"\0" * 4 * len(versions),
        versions=tuple(VersionRun(version, 1) for version in versions),
        finish_reason=FinishReason.STOP,
        pool="p",
    )
    node = Node(node_id=0, parent=None, edge=Edge.ROOT, prompt_ids=(1,), completion=completion)
    outcome = {"outcome": Outcome.SCORED, "reward": 1.0}
    return Trajectory(rollout_id="r", group_id="g", task_id="t", index=0, nodes=(node,), **outcome)


@pytest.mark.row("P-67")
def test_staleness_is_counted_in_versions_of_tokens():
    """Staleness is the trainer's version minus that of the oldest token, and its unit stands in every name."""
    fresh, long = drawn_under(6, 6), drawn_under(3, 4, 5, 6)
    group = Group(group_id="g", task_id="t", ticket=0, admitted_version=3, trajectories=(fresh, long))

    # The mistake: two optimizer steps per batch, and batches counted; or the newest token taken for all.
    batches = (7 - 3) // 2
    assert batches < group_staleness(group, 7)
    assert 7 - max(run.version for run in long.nodes[0].completion.versions) < group_staleness(group, 7)

    assert group_staleness(group, 7) == 4
    named = [metric.name for metric in METRICS if metric.name.startswith("staleness/")]
    assert named
    assert all(name.endswith("_versions") for name in named)
    described = type(RunConfig().rollout).model_fields["max_staleness"].description
    assert described
    assert described.startswith("Versions between")
