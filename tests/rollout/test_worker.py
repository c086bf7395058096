"""Promises of groups and of the worker that plays them."""

import asyncio
import math
from itertools import count

import pytest

from etude.errors import EndOfTasksError, RunError
from etude.rollout.buffer import SlotBuffer, Ticket
from etude.rollout.doubles import ScriptedPlayer
from etude.rollout.group import GroupPlan, PlayedGroup, derive_seed, play_group
from etude.rollout.worker import RolloutWorker
from etude.types import Outcome, Task

PLAN = GroupPlan(seed=3, size=4, min_survivors=2, retries=1)
SCORED = (Outcome.SCORED, 1.0, 1)
BROKEN = (Outcome.INFRA_ERROR, None, 1)


def task(name: str) -> Task:
    return Task(task_id=name, path=f"/tasks/{name}", digest="d", instruction="fix it")


class Endless:
    """Tasks t0, t1, ..., for ever or up to an end."""

    def __init__(self, end: float = math.inf) -> None:
        self._numbers = count()
        self._end = end

    def next_task(self) -> Task:
        number = next(self._numbers)
        if number >= self._end:
            raise EndOfTasksError("no more")
        return task(f"t{number}")

    def cursor(self) -> bytes:
        return b""

    def restore(self, cursor: bytes) -> None:
        return None


async def played(player: ScriptedPlayer, plan: GroupPlan = PLAN) -> PlayedGroup:
    ticket = Ticket(number=5, task_id="t", admitted_version=2)
    return await play_group(player, task("t"), ticket, plan, concurrency=asyncio.Semaphore(2))


async def test_a_group_plays_its_attempts_together_within_the_bound_and_from_its_version_on():
    player = ScriptedPlayer(lambda _task, _index, _attempt: SCORED)
    result = await played(player)
    assert [trajectory.index for trajectory in result.group.trajectories] == [0, 1, 2, 3]
    assert player.num_alive_max == 2
    assert set(player.versions) == {(2, None)}
    assert len(set(player.seeds.values())) == 4


async def test_only_infrastructure_failures_are_replaced_with_a_seed_of_their_own():
    def script(_task: Task, index: int, attempt: int) -> tuple[Outcome, float | None, int]:
        if index == 0:
            return SCORED if attempt else BROKEN
        if index == 1:
            return BROKEN
        return (Outcome.JUDGE_ERROR, None, 0) if index == 2 else SCORED

    player = ScriptedPlayer(script)
    result = await played(player)
    assert [trajectory.rollout_id for trajectory in result.group.trajectories] == ["g000005-0r1", "g000005-3"]
    assert [trajectory.rollout_id for trajectory in result.unscored] == [
        "g000005-0",
        "g000005-1",
        "g000005-1r1",
        "g000005-2",
    ]
    assert not result.lost
    assert player.seeds["g000005-0"] != player.seeds["g000005-0r1"]


async def test_a_group_with_too_few_survivors_is_lost_for_a_reason():
    result = await played(ScriptedPlayer(lambda _task, index, _attempt: SCORED if index == 0 else BROKEN))
    assert result.lost == "too_few_survivors"


def test_a_seed_depends_on_every_part_of_its_place():
    places = [(1, "a", 2), (1, "a", 3), (1, "b", 2), (2, "a", 2)]
    assert len({derive_seed(seed, *place) for seed, *place in places}) == 4
    assert derive_seed(1, "a") == derive_seed(1, "a")


async def train(buffer: SlotBuffer, steps: int) -> list[str]:
    """Train at once on whatever is ready; every sampler follows at once."""
    seen: list[str] = []
    for version in range(buffer.version, buffer.version + steps):
        groups = [await buffer.take(version) for _ in range(buffer.groups_per_step)]
        seen.extend(group.task_id for group in groups)
        buffer.trained(version + 1)
        buffer.served(version + 1)
    return seen


async def test_the_worker_keeps_the_slots_full_and_loses_groups_with_a_reason():
    def script(task: Task, index: int, _attempt: int) -> tuple[Outcome, float | None, int]:
        number = int(task.task_id[1:])
        return BROKEN if number % 5 == 4 else (Outcome.SCORED, float(index), number * 7 % 11)

    buffer = SlotBuffer(groups_per_step=2, max_staleness=1)
    player = ScriptedPlayer(script)
    worker = RolloutWorker(player=player, buffer=buffer, plan=PLAN, concurrency=6)
    async with asyncio.timeout(20), asyncio.TaskGroup() as loops:
        running = loops.create_task(worker.run(Endless()))
        seen = await train(buffer, 10)
        worker.stop()
        await running
    assert len(set(seen)) == 20
    assert not [name for name in seen if int(name[1:]) % 5 == 4]
    assert buffer.lost["too_few_survivors"] >= 3
    assert player.num_alive_max <= 6
    assert player.num_alive == 0


async def test_stopped_groups_stay_in_flight_and_are_played_first_after_a_resume():
    ends = asyncio.Event()
    buffer = SlotBuffer(groups_per_step=2, max_staleness=0)
    stuck = ScriptedPlayer(lambda _task, _index, _attempt: (Outcome.SCORED, 1.0, 10**9))
    worker = RolloutWorker(player=stuck, buffer=buffer, plan=PLAN, concurrency=8)
    async with asyncio.timeout(20):
        running = asyncio.create_task(worker.run(Endless()))
        for _ in range(50):
            await asyncio.sleep(0)
        assert stuck.num_alive == 8
        worker.stop()
        await running
    assert len(stuck.cancelled) == 8
    assert [ticket.task_id for ticket in buffer.in_flight] == ["t0", "t1"]
    again = SlotBuffer.restore(buffer.state(), {}, groups_per_step=2, max_staleness=0)

    async def keep(_ticket: Ticket, _played: PlayedGroup) -> None:
        ends.set()

    worker = RolloutWorker(
        player=ScriptedPlayer(lambda _task, _index, _attempt: SCORED),
        buffer=again,
        plan=PLAN,
        concurrency=8,
        on_group=keep,
    )
    async with asyncio.timeout(20):
        running = asyncio.create_task(worker.run(Endless(), resumed={"t0": task("t0"), "t1": task("t1")}))
        await ends.wait()
        assert sorted(await train(again, 1)) == ["t0", "t1"]
        worker.stop()
        await running


async def test_a_trainer_does_not_wait_for_groups_that_no_task_is_left_for():
    buffer = SlotBuffer(groups_per_step=2, max_staleness=1)
    player = ScriptedPlayer(lambda _task, _index, _attempt: (Outcome.SCORED, 1.0, 5))
    worker = RolloutWorker(player=player, buffer=buffer, plan=PLAN, concurrency=4)
    async with asyncio.timeout(20):
        running = asyncio.create_task(worker.run(Endless(end=5)))
        assert len(await train(buffer, 2)) == 4
        with pytest.raises(EndOfTasksError, match="1 groups short of the step to version 3"):
            await train(buffer, 1)
        worker.stop()
        await running


async def test_a_run_in_which_no_group_succeeds_ends_with_the_reason():
    buffer = SlotBuffer(groups_per_step=2, max_staleness=1)
    player = ScriptedPlayer(lambda _task, _index, _attempt: BROKEN)
    worker = RolloutWorker(player=player, buffer=buffer, plan=PLAN, concurrency=4, max_lost_in_a_row=3)
    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as caught:
            await worker.run(Endless())
    assert caught.group_contains(RunError, match="3 groups in a row were lost.*sandbox: scripted")
