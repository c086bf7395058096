"""G attempts at one task."""

import asyncio
import hashlib

import msgspec

from etude.interfaces import RolloutPlayer
from etude.rollout.buffer import Ticket
from etude.types import WITH_REWARD, Group, Outcome, Task, Trajectory


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How every group of a run is played."""

    seed: int
    """Of the run."""
    size: int
    """Attempts per group."""
    min_survivors: int
    """Scored attempts without which a group is lost."""
    retries: int
    """Attempts again after an infrastructure failure, per place in the group."""


class PlayedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group with everything that was tried for it."""

    group: Group
    """The scored attempts only, by index."""
    unscored: tuple[Trajectory, ...]
    """Attempts without a reward, those that were replaced included."""
    lost: str = ""
    """Why the group cannot be trained on; empty when it can."""


def derive_seed(seed: int, *place: str | int) -> int:
    """Return a 63-bit seed for a place below `seed`; different places give independent seeds."""
    name = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


async def play_group(
    player: RolloutPlayer, task: Task, ticket: Ticket, plan: GroupPlan, *, concurrency: asyncio.Semaphore
) -> PlayedGroup:
    """Play all attempts of a ticket's group at once, as far as `concurrency` allows.

    An attempt that infrastructure failed is replaced, under the same index with a seed of its own, up to
    `plan.retries` times. What is left without a score is no part of the group.
    """

    async def play(index: int, attempt: int) -> Trajectory:
        return await player.play(
            task,
            group_id=ticket.group_id,
            index=index,
            seed=derive_seed(plan.seed, "rollout", ticket.number, index, attempt),
            purpose="train",
            attempt=attempt,
            min_version=ticket.admitted_version,
        )

    async def play_until_known(index: int) -> list[Trajectory]:
        # A replacement keeps its predecessor's place: queued anew, it would wait behind groups that are due later.
        async with concurrency:
            tried = [await play(index, 0)]
            while tried[-1].outcome is Outcome.INFRA_ERROR and len(tried) <= plan.retries:
                tried.append(await play(index, len(tried)))
            return tried

    async with asyncio.TaskGroup() as attempts:
        places = [
            attempts.create_task(play_until_known(index), name=f"{ticket.group_id}-{index}")
            for index in range(plan.size)
        ]
    tried = [trajectory for place in places for trajectory in place.result()]
    scored = tuple(trajectory for trajectory in tried if trajectory.outcome in WITH_REWARD)
    return PlayedGroup(
        group=Group(
            group_id=ticket.group_id,
            task_id=task.task_id,
            ticket=ticket.number,
            admitted_version=ticket.admitted_version,
            trajectories=scored,
        ),
        unscored=tuple(trajectory for trajectory in tried if trajectory.outcome not in WITH_REWARD),
        lost="" if len(scored) >= plan.min_survivors else "too_few_survivors",
    )
