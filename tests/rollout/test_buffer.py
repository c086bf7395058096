"""Promises of the slot buffer."""

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, StoreError
from etude.rollout.buffer import BufferState, SlotBuffer, Ticket
from etude.types import Group


def played(ticket: Ticket) -> Group:
    return Group(
        group_id=ticket.group_id,
        task_id=ticket.task_id,
        ticket=ticket.number,
        admitted_version=ticket.admitted_version,
        trajectories=(),
    )


class Fleet:
    """Drives a buffer the way a run would, with every order of events left to a choice."""

    def __init__(self, buffer: SlotBuffer, choice: random.Random) -> None:
        self.buffer = buffer
        self.choice = choice
        self.served = buffer.version
        self.taken = 0
        self.admitted: set[int] = set()
        self.trained: list[int] = []
        self.lost: set[int] = set()

    def moves(self) -> list[str]:
        possible = ["lose", "finish", "finish"] if self.buffer.in_flight else []
        if self.buffer.can_admit():
            possible += ["admit", "admit"]
        if self.taken == self.buffer.groups_per_step:
            possible.append("train")
        elif self.buffer.num_ready:
            possible.append("take")
        if self.served < self.buffer.version:
            possible.append("serve")
        return possible

    def move(self, name: str) -> None:
        buffer = self.buffer
        if name == "admit":
            self.admitted.add(buffer.admit("task").number)
        elif name in ("finish", "lose"):
            ticket = self.choice.choice(buffer.in_flight)
            if name == "finish":
                buffer.finish(ticket, played(ticket))
            else:
                buffer.lose(ticket, "sandbox")
                self.lost.add(ticket.number)
        elif name == "take":
            self.take()
        elif name == "train":
            buffer.trained(buffer.version + 1)
            self.taken = 0
        else:
            self.served = self.choice.randint(self.served + 1, buffer.version)
            buffer.served(self.served)

    def take(self) -> None:
        group = self.buffer.try_take(self.buffer.version)
        if group is None:
            assert self.buffer.due(), "a ready group waits although nothing in flight is due"
            return
        assert self.buffer.version - group.admitted_version <= self.buffer.max_staleness
        self.trained.append(group.ticket)
        self.taken += 1


sizes = st.tuples(st.integers(1, 4), st.integers(0, 3))
seeds = st.integers(0, 2**32)


@given(sizes, seeds)
def test_no_group_is_trained_beyond_max_staleness_and_each_is_trained_once_or_lost(size: tuple[int, int], seed: int):
    fleet = Fleet(SlotBuffer(groups_per_step=size[0], max_staleness=size[1]), random.Random(seed))
    for _ in range(400):
        possible = fleet.moves()
        assert possible, "nothing can happen any more"
        fleet.move(fleet.choice.choice(possible))
    waiting = {ticket.number for ticket in (*fleet.buffer.in_flight, *fleet.buffer.state().finished)}
    assert len(set(fleet.trained)) == len(fleet.trained)
    assert set(fleet.trained).isdisjoint(fleet.lost)
    assert set(fleet.trained) | fleet.lost | waiting == fleet.admitted
    assert fleet.buffer.lost.get("sandbox", 0) == len(fleet.lost)


@given(sizes, seeds)
def test_a_step_is_completed_from_any_state_once_what_is_in_flight_finishes(size: tuple[int, int], seed: int):
    fleet = Fleet(SlotBuffer(groups_per_step=size[0], max_staleness=size[1]), random.Random(seed))
    for _ in range(fleet.choice.randint(0, 200)):
        fleet.move(fleet.choice.choice(fleet.moves()))
    target = fleet.buffer.version + 3
    for _ in range(1000):
        if fleet.buffer.version == target:
            break
        possible = [name for name in ("serve", "admit", "finish", "take", "train") if name in fleet.moves()]
        fleet.move(fleet.choice.choice(possible))
    assert fleet.buffer.version == target


@given(sizes, seeds)
def test_a_restored_buffer_keeps_every_promise(size: tuple[int, int], seed: int):
    fleet = Fleet(SlotBuffer(groups_per_step=size[0], max_staleness=size[1]), random.Random(seed))
    for _ in range(fleet.choice.randint(0, 150)):
        fleet.move(fleet.choice.choice(fleet.moves()))
    state = msgspec.json.decode(msgspec.json.encode(fleet.buffer.state()), type=BufferState)
    groups = {ticket.group_id: played(ticket) for ticket in state.finished}
    again = SlotBuffer.restore(state, groups, groups_per_step=size[0], max_staleness=size[1])
    assert again.state() == state
    assert again.num_free == fleet.buffer.num_free
    resumed = Fleet(again, fleet.choice)
    resumed.served = state.served_version
    for _ in range(150):
        possible = resumed.moves()
        assert possible
        resumed.move(resumed.choice.choice(possible))


@given(seeds)
def test_staleness_zero_is_fully_synchronous(seed: int):
    fleet = Fleet(SlotBuffer(groups_per_step=3, max_staleness=0), random.Random(seed))
    for _ in range(200):
        fleet.move(fleet.choice.choice(fleet.moves()))
        assert all(ticket.admitted_version == fleet.buffer.version for ticket in fleet.buffer.in_flight)


@given(sizes, seeds)
def test_a_sampler_that_returns_with_older_weights_breaks_no_deadline(size: tuple[int, int], seed: int):
    fleet = Fleet(SlotBuffer(groups_per_step=size[0], max_staleness=size[1]), random.Random(seed))
    for _ in range(300):
        if fleet.served and fleet.choice.random() < 0.1:
            fleet.served -= 1
            fleet.buffer.served(fleet.served)
        fleet.move(fleet.choice.choice(fleet.moves()))


def test_a_due_group_is_waited_for_while_a_younger_one_is_ready():
    buffer = SlotBuffer(groups_per_step=1, max_staleness=1)
    old, young = buffer.admit("old"), buffer.admit("young")
    buffer.finish(young, played(young))
    assert buffer.try_take(0) == played(young)
    buffer.trained(1)
    buffer.served(1)
    younger = buffer.admit("younger")
    buffer.finish(younger, played(younger))
    assert buffer.try_take(1) is None
    assert buffer.due() == (old,)
    buffer.finish(old, played(old))
    assert buffer.try_take(1) == played(old)


def test_a_trained_group_holds_its_slot_until_every_sampler_serves_its_weights():
    buffer = SlotBuffer(groups_per_step=1, max_staleness=0)
    ticket = buffer.admit("task")
    buffer.finish(ticket, played(ticket))
    assert buffer.try_take(0) is not None
    assert not buffer.can_admit()
    buffer.trained(1)
    assert not buffer.can_admit()
    buffer.served(1)
    assert buffer.admit("next").admitted_version == 1


def test_a_lost_ticket_frees_its_slot_at_once_and_cannot_be_handed_in():
    buffer = SlotBuffer(groups_per_step=1, max_staleness=0)
    ticket = buffer.admit("task")
    buffer.lose(ticket, "too few survivors")
    assert buffer.can_admit()
    assert buffer.lost == {"too few survivors": 1}
    with pytest.raises(ValueError, match="not in flight"):
        buffer.finish(ticket, played(ticket))


def test_versions_are_refused_unless_the_trainer_made_them():
    buffer = SlotBuffer(groups_per_step=1, max_staleness=1)
    with pytest.raises(ValueError, match="has not made"):
        buffer.served(1)
    with pytest.raises(ValueError, match="grow by one"):
        buffer.trained(1)
    with pytest.raises(ValueError, match="starts from version 0"):
        buffer.try_take(1)


def test_restore_refuses_a_missing_group_and_a_bound_that_was_lowered_too_far():
    buffer = SlotBuffer(groups_per_step=1, max_staleness=2)
    tickets = [buffer.admit("task") for _ in range(3)]
    buffer.finish(tickets[0], played(tickets[0]))
    state = buffer.state()
    with pytest.raises(StoreError, match="g000000"):
        SlotBuffer.restore(state, {}, groups_per_step=1, max_staleness=2)
    with pytest.raises(ConfigError, match="max_staleness = 1"):
        SlotBuffer.restore(state, {"g000000": played(tickets[0])}, groups_per_step=1, max_staleness=1)


async def test_waiting_for_slots_and_groups_ends_when_they_appear():
    buffer = SlotBuffer(groups_per_step=2, max_staleness=1)
    durations = random.Random(7)
    oldest: list[int] = []

    async def play(ticket: Ticket) -> None:
        for _ in range(durations.randint(0, 30)):
            await asyncio.sleep(0)
        if durations.random() < 0.2:
            buffer.lose(ticket, "sandbox")
        else:
            buffer.finish(ticket, played(ticket))

    async def admit(tasks: asyncio.TaskGroup) -> None:
        while True:
            await buffer.wait_for_slot()
            tasks.create_task(play(buffer.admit("task")))

    async def train() -> None:
        for version in range(20):
            groups = [await buffer.take(version), await buffer.take(version)]
            oldest.extend(version - group.admitted_version for group in groups)
            buffer.trained(version + 1)
            buffer.served(version + 1)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        admitting = tasks.create_task(admit(tasks))
        await train()
        admitting.cancel()
    assert max(oldest) == 1
    assert len(oldest) == 40
