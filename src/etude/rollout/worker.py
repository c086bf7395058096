"""Keeps the slots of a buffer full of groups being played."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from etude.errors import EndOfTasksError, EtudeError, HarnessError, RunError
from etude.interfaces import RolloutPlayer, TaskSource
from etude.rollout.buffer import SlotBuffer, Ticket
from etude.rollout.group import GroupPlan, PlayedGroup, play_group
from etude.telemetry.waits import waiting
from etude.types import Task

_SLOT_WITHIN_S = 86400.0
"""What frees slots has deadlines of its own; this one is for what nobody thought of."""


class RolloutWorker:
    """Plays a group for every ticket, a bounded number of attempts at a time; owns all its tasks."""

    def __init__(
        self,
        *,
        player: RolloutPlayer,
        buffer: SlotBuffer,
        plan: GroupPlan,
        concurrency: int,
        max_lost_in_a_row: int = 16,
        on_admit: Callable[[Ticket], None] = lambda _: None,
        on_group: Callable[[Ticket, PlayedGroup], Awaitable[None]] | None = None,
    ) -> None:
        """`concurrency` bounds the attempts, and so the sandboxes, alive at once.

        After `max_lost_in_a_row` groups without a single good one, `run` raises: nothing will come of waiting.
        `on_admit` hears of every new ticket at once. `on_group` hears of every group that ended, lost ones included;
        the buffer does when it has returned, so that what it keeps is kept before anybody trains on it.
        """
        self._player = player
        self._buffer = buffer
        self._plan = plan
        self._concurrency = asyncio.Semaphore(concurrency)
        self._max_lost_in_a_row = max_lost_in_a_row
        self._lost_in_a_row = 0
        self._on_admit = on_admit
        self._on_group = on_group
        self._stopping = asyncio.Event()

    async def run(self, source: TaskSource, *, resumed: Mapping[str, Task] | None = None) -> None:
        """Play groups until `stop`; tickets that the buffer says are in flight come first.

        `resumed` has the tasks of those tickets by id. After `stop`, attempts under way are cancelled and their
        tickets stay in flight: a checkpoint of the buffer names them, and a resumed run plays them again.
        """
        async with asyncio.TaskGroup() as loops:
            playing = loops.create_task(self._play_all(source, resumed or {}), name="rollout worker")
            await self._stopping.wait()
            playing.cancel()

    def stop(self) -> None:
        """Let `run` end."""
        self._stopping.set()

    async def _play_all(self, source: TaskSource, resumed: Mapping[str, Task]) -> None:
        """Admit and play until there are no more tasks, then let what is in flight finish."""
        async with asyncio.TaskGroup() as groups:
            for ticket in self._buffer.in_flight:
                groups.create_task(self._play(ticket, resumed[ticket.task_id]), name=ticket.group_id)
            while True:
                async with waiting("a slot", owner="admit", on="train", deadline_s=_SLOT_WITHIN_S):
                    await self._buffer.wait_for_slot()
                try:
                    task = source.next_task()
                except EndOfTasksError:
                    self._buffer.close()
                    return
                ticket = self._buffer.admit(task.task_id)
                self._on_admit(ticket)
                groups.create_task(self._play(ticket, task), name=ticket.group_id)

    async def _play(self, ticket: Ticket, task: Task) -> None:
        """Play one group and hand it to the buffer."""
        played = await play_group(self._player, task, ticket, self._plan, concurrency=self._concurrency)
        if self._on_group is not None:
            await self._on_group(ticket, played)
        if not played.lost:
            self._lost_in_a_row = 0
            self._buffer.finish(ticket, played.group)
            return
        self._lost_in_a_row += 1
        self._buffer.lose(ticket, played.lost)
        if self._lost_in_a_row >= self._max_lost_in_a_row:
            raise _hopeless(self._lost_in_a_row, played)


def _hopeless(count: int, played: PlayedGroup) -> EtudeError:
    """Return the error for a run in which no group succeeds, with what ended the last attempt."""
    failure = next((one.failure for one in reversed(played.unscored) if one.failure is not None), None)
    if failure is None:
        return RunError(f"{count} groups in a row were lost: {played.lost}")
    kind = HarnessError if failure.component == "harness" else RunError
    last = f"{failure.component}: {failure.reason}: {failure.message}"
    return kind(f"{count} groups in a row were lost, none was played to a reward. The last attempt failed in {last}")
