"""Slots that bound staleness by admission: no group is ever too old to train on, and none is discarded.

`docs/design/0001-versions-and-staleness.md` has the rule and its proof. In short: a group admitted while the oldest
sampler serves version a may be trained in the step built from version n as long as n <= a + max_staleness, its
deadline. There are `(max_staleness + 1) * groups_per_step` slots; a group holds one from admission until every
sampler serves the weights it was trained into.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Self

import msgspec

from etude.errors import ConfigError, EndOfTasksError, StoreError
from etude.telemetry.waits import waiting
from etude.types import Group


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to play one group."""

    number: int
    """Place in the order of admission, from 0."""
    task_id: str
    admitted_version: int
    """The oldest policy version that a sampler served at admission; no token may be drawn under an older one."""

    @property
    def group_id(self) -> str:
        """Name of the group played for it, unique within a run."""
        return f"g{self.number:06d}"


class BufferState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of a buffer; finished groups are named, by `Ticket.group_id`, and stored elsewhere."""

    version: int
    """Policy version that the step being built starts from."""
    served_version: int
    next_number: int
    in_flight: tuple[Ticket, ...] = ()
    """Admitted and unfinished: played again, with the same tasks, before anything new."""
    finished: tuple[Ticket, ...] = ()
    """Finished and not yet trained on."""
    unserved: dict[int, int] = {}
    """Policy version to the number of groups trained into it that still hold slots."""
    num_trained: int = 0
    lost: dict[str, int] = {}
    """Groups lost, by reason."""


class SlotBuffer:
    """Admits groups, takes them back finished, and hands them to the trainer in a feasible order.

    All methods but the two that wait are plain state changes, for one event loop.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int, version: int = 0, stall_s: float = 3600.0) -> None:
        """`stall_s` bounds every wait for a slot or a group; beyond it something is wrong with who should bring it."""
        self._stall_s = stall_s
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._version = version
        self._served = version
        self._next_number = 0
        self._in_flight: dict[int, Ticket] = {}
        self._ready: dict[int, tuple[Ticket, Group]] = {}
        self._taken: list[Ticket] = []
        self._unserved: dict[int, int] = {}
        self._num_trained = 0
        self._lost: Counter[str] = Counter()
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def num_free(self) -> int:
        """Slots that nothing holds."""
        held = len(self._in_flight) + len(self._ready) + len(self._taken) + sum(self._unserved.values())
        return self.num_slots - held

    @property
    def in_flight(self) -> tuple[Ticket, ...]:
        """Tickets whose groups are being played, or are to be played again after `restore`; oldest first."""
        return tuple(self._in_flight.values())

    @property
    def num_ready(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._ready)

    @property
    def version(self) -> int:
        """Policy version that the step being built starts from."""
        return self._version

    @property
    def lost(self) -> dict[str, int]:
        """Groups lost so far, by reason."""
        return dict(self._lost)

    def can_admit(self) -> bool:
        """Whether a slot is free and a group admitted now would meet its deadline at the worst."""
        # The second condition follows from the first unless a sampler came back with older weights.
        deadline = self._served + self.max_staleness
        return self.num_free > 0 and self._is_feasible([*self._deadlines(), deadline])

    async def wait_for_slot(self) -> None:
        """Return once `can_admit`; with one admitting loop it still holds when `admit` is called right after."""
        if self.can_admit():
            return
        others = "the trainer, or samplers that do not follow it,"
        async with waiting("a free slot", owner="admit", on=others, deadline_s=self._stall_s):
            while not self.can_admit():
                await self._changed.wait()

    def admit(self, task_id: str) -> Ticket:
        """Give a free slot to a group of this task."""
        if not self.can_admit():
            msg = f"no slot is free for task {task_id!r} ({self.num_slots} slots): await wait_for_slot() before admit()"
            raise ValueError(msg)
        ticket = Ticket(number=self._next_number, task_id=task_id, admitted_version=self._served)
        self._next_number += 1
        self._in_flight[ticket.number] = ticket
        return ticket

    def close(self) -> None:
        """Say that nothing more will be admitted, so that `take` does not wait for it."""
        self._closed = True
        self._notify()

    def finish(self, ticket: Ticket, group: Group) -> None:
        """Hand in the group that was played for a ticket; it keeps its slot."""
        if group.ticket != ticket.number or group.group_id != ticket.group_id:
            msg = f"group {group.group_id} (ticket {group.ticket}) was not played for ticket {ticket.number}"
            raise ValueError(msg)
        self._ready[ticket.number] = (self._withdraw(ticket), group)
        self._notify()

    def lose(self, ticket: Ticket, reason: str) -> None:
        """Give up on a ticket for a stated reason: its slot is free at once."""
        self._withdraw(ticket)
        self._lost[reason] += 1
        self._notify()

    def try_take(self, trainer_version: int) -> Group | None:
        """Return a finished group that may join the step built from `trainer_version`, or None while one must wait.

        A younger group overtakes an older one only while every unfinished group can still meet its deadline.
        """
        if trainer_version != self._version or not self._remaining:
            msg = (
                f"the trainer asks for a group at version {trainer_version}, but the step being built starts from "
                f"version {self._version} and misses {self._remaining} groups: call trained() after each step"
            )
            raise ValueError(msg)
        if not self._ready:
            return None
        # Taking a group delays those due before it, so the one due first is the easiest: if it must wait, all must.
        number = min(self._ready, key=lambda number: (self._deadline(self._ready[number][0]), number))
        ticket, group = self._ready[number]
        if self._deadline(ticket) > self._wall():
            return None
        del self._ready[number]
        self._taken.append(ticket)
        return group

    def retake(self, number: int) -> Group:
        """Return the finished group of a ticket that was in the step being built when the run was interrupted."""
        if number not in self._ready or not self._remaining:
            msg = f"ticket {number} cannot join the step to version {self._version + 1} again"
            raise ValueError(msg)
        ticket, group = self._ready.pop(number)
        self._taken.append(ticket)
        return group

    async def take(self, trainer_version: int) -> Group:
        """Wait for the next group of the step built from `trainer_version`.

        Raise `EndOfTasksError` when the buffer is closed and nothing in flight could still come.
        """
        if (group := self.try_take(trainer_version)) is not None:
            return group
        name = f"a group for the step to version {self._version + 1}"
        async with waiting(
            name, owner="train", on=f"{len(self._in_flight)} groups in flight", deadline_s=self._stall_s
        ):
            while (group := self.try_take(trainer_version)) is None:
                if self._closed and not self._in_flight:
                    raise self._used_up()
                await self._changed.wait()
        return group

    def trained(self, version: int) -> None:
        """Note that the optimizer step over the taken groups made `version`."""
        if version != self._version + 1 or self._remaining:
            msg = (
                f"version {version} cannot follow version {self._version} with {len(self._taken)} of "
                f"{self.groups_per_step} groups taken: versions grow by one, a step trains on all its groups"
            )
            raise ValueError(msg)
        self._num_trained += len(self._taken)
        self._unserved[version] = len(self._taken)
        self._taken.clear()
        self._version = version
        self._notify()

    def served(self, version: int) -> None:
        """Note the oldest version that any sampler serves: groups trained into it, or before it, free their slots."""
        if version > self._version:
            msg = f"a sampler serves version {version}, which the trainer at version {self._version} has not made"
            raise ValueError(msg)
        self._served = version
        self._unserved = {made: count for made, count in self._unserved.items() if made > version}
        self._notify()

    def due(self) -> tuple[Ticket, ...]:
        """Tickets in flight, one of which the step being built has to wait for before any younger group."""
        wall = self._wall()
        return tuple(ticket for ticket in self._in_flight.values() if self._deadline(ticket) <= wall < math.inf)

    def state(self) -> BufferState:
        """Return what `restore` needs; groups taken for an unfinished step count as finished."""
        waiting = [*self._taken, *(ticket for ticket, _ in self._ready.values())]
        return BufferState(
            version=self._version,
            served_version=self._served,
            next_number=self._next_number,
            in_flight=self.in_flight,
            finished=tuple(sorted(waiting, key=lambda ticket: ticket.number)),
            unserved=dict(self._unserved),
            num_trained=self._num_trained,
            lost=dict(self._lost),
        )

    @classmethod
    def restore(
        cls,
        state: BufferState,
        groups: Mapping[str, Group],
        *,
        groups_per_step: int,
        max_staleness: int,
        stall_s: float = 3600.0,
    ) -> Self:
        """Return a buffer that continues from `state`; `groups` holds the finished groups by group_id.

        Raise `StoreError` when a finished group is missing, `ConfigError` when the numbers were lowered so far that
        what was admitted under the old ones could not be trained in time.
        """
        shape = {"groups_per_step": groups_per_step, "max_staleness": max_staleness}
        buffer = cls(**shape, version=state.version, stall_s=stall_s)
        buffer._served = state.served_version
        buffer._next_number = state.next_number
        buffer._in_flight = {ticket.number: ticket for ticket in state.in_flight}
        for ticket in state.finished:
            if ticket.group_id not in groups:
                msg = f"group {ticket.group_id} was finished before the checkpoint but is not in the run directory"
                raise StoreError(f"{msg}: resume from an earlier checkpoint")
            buffer._ready[ticket.number] = (ticket, groups[ticket.group_id])
        buffer._unserved = dict(state.unserved)
        buffer._num_trained = state.num_trained
        buffer._lost = Counter(state.lost)
        if buffer.num_free < 0 or not buffer._is_feasible(buffer._deadlines()):
            msg = (
                f"rollout.groups_per_step = {groups_per_step} and rollout.max_staleness = {max_staleness} cannot train "
                "in time what the checkpoint holds: resume with the values it was written under"
            )
            raise ConfigError(msg)
        return buffer

    @property
    def _remaining(self) -> int:
        """Groups that the step being built still misses."""
        return self.groups_per_step - len(self._taken)

    def _deadline(self, ticket: Ticket) -> int:
        """Last version from which a step may train on the ticket's group."""
        return ticket.admitted_version + self.max_staleness

    def _deadlines(self) -> Iterable[int]:
        """Deadlines of all groups that were admitted and not yet taken."""
        yield from map(self._deadline, self._in_flight.values())
        yield from (self._deadline(ticket) for ticket, _ in self._ready.values())

    def _timetable(self, deadlines: Iterable[int]) -> Iterable[tuple[int, int, int]]:
        """Train on groups in the order they are due: yield deadline, version trained from, places left in that step."""
        version, places = self._version, self._remaining
        for deadline in sorted(deadlines):
            if not places:
                version, places = version + 1, self.groups_per_step
            places -= 1
            yield deadline, version, places

    def _is_feasible(self, deadlines: Iterable[int]) -> bool:
        """Whether groups with these deadlines can all be trained in time."""
        return all(version <= deadline for deadline, version, _ in self._timetable(deadlines))

    def _wall(self) -> float:
        """First version by which every place is needed for groups due by then; infinity when there is slack."""
        for deadline, version, places in self._timetable(self._deadlines()):
            if version == deadline and not places:
                return deadline
        return math.inf

    def _withdraw(self, ticket: Ticket) -> Ticket:
        """Take a ticket out of flight."""
        if self._in_flight.get(ticket.number) != ticket:
            msg = f"ticket {ticket.number} is not in flight: it was finished or lost before"
            raise ValueError(msg)
        return self._in_flight.pop(ticket.number)

    def _used_up(self) -> EndOfTasksError:
        msg = f"the tasks are used up {self._remaining} groups short of the step to version {self._version + 1}"
        return EndOfTasksError(f"{msg}: add tasks, or lower trainer.steps")

    def _notify(self) -> None:
        """Wake everyone who waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
