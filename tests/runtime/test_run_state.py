# pyright: basic
"""What the facts of a run's controllers say is what its buffer was."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.rollout.buffer import SlotBuffer
from etude.runtime.run_state import RunState, fold
from etude.telemetry.events import (
    Admitted,
    CheckpointDeleted,
    CheckpointWritten,
    GroupLost,
    GroupReady,
    GroupTaken,
    LineageOpened,
    Resumed,
    VersionMade,
)
from etude.types import Group

sizes = st.tuples(st.integers(1, 4), st.integers(0, 3))
seeds = st.integers(0, 2**32)


def ready(ticket):
    return GroupReady(ticket=ticket, key=f"groups/{ticket}", digest=f"d{ticket}", rollouts=(), drawn=0)


def made(version):
    return VersionMade(lineage="0001-a", version=version, step=version)


class Schedule:
    """A buffer driven at random, with the facts that its controller records."""

    def __init__(self, size, seed):
        self.buffer = SlotBuffer(groups_per_step=size[0], max_staleness=size[1])
        self.choice = random.Random(seed)
        self.facts = []
        self.served = 0
        self.taken = []
        self.steps = []

    def moves(self):
        possible = ["lose", "finish", "finish"] if self.buffer.in_flight else []
        possible += ["admit", "admit"] if self.buffer.can_admit() else []
        if len(self.taken) == self.buffer.groups_per_step:
            possible.append("train")
        elif self.buffer.num_ready:
            possible.append("take")
        return possible + (["serve"] if self.served < self.buffer.version else [])

    def run(self, moves):
        for _ in range(moves):
            getattr(self, self.choice.choice(self.moves()))()

    def admit(self):
        ticket = self.buffer.admit("task")
        self.facts.append(Admitted(ticket=ticket.number, task="task", version=ticket.admitted_version))

    def finish(self):
        ticket = self.choice.choice(self.buffer.in_flight)
        self.facts.append(ready(ticket.number))
        self.buffer.finish(
            ticket,
            Group(
                group_id=ticket.group_id,
                task_id="task",
                ticket=ticket.number,
                admitted_version=ticket.admitted_version,
                trajectories=(),
            ),
        )

    def lose(self):
        ticket = self.choice.choice(self.buffer.in_flight)
        self.facts.append(GroupLost(ticket=ticket.number, reason="sandbox"))
        self.buffer.lose(ticket, "sandbox")

    def take(self):
        group = self.buffer.try_take(self.buffer.version)
        if group is not None:
            self.taken.append(group.ticket)
            self.facts.append(GroupTaken(ticket=group.ticket, version=self.buffer.version))

    def train(self):
        self.steps.append(tuple(self.taken))
        self.taken = []
        self.buffer.trained(self.buffer.version + 1)
        self.facts.append(made(self.buffer.version))

    def serve(self):
        self.served = self.choice.randint(self.served + 1, self.buffer.version)
        self.buffer.served(self.served)


def live(buffer):
    """The buffer's state once every sampler serves the newest version, as it is when a run goes on."""
    state = buffer.state()
    in_flight = tuple(sorted(state.in_flight, key=lambda ticket: ticket.number))
    return msgspec.structs.replace(state, served_version=state.version, unserved={}, in_flight=in_flight)


@given(sizes, seeds, st.integers(0, 200), st.integers(0, 60))
def test_the_facts_say_what_the_buffer_was_at_any_cut(size, seed, before, after):
    schedule = Schedule(size, seed)
    schedule.run(before)
    at_checkpoint = fold(RunState(), schedule.facts)
    assert at_checkpoint.buffer() == live(schedule.buffer)
    stored = msgspec.json.decode(msgspec.json.encode(at_checkpoint), type=RunState)
    count = len(schedule.facts)
    schedule.run(after)
    state = fold(stored, schedule.facts[count:])
    assert state == fold(RunState(), schedule.facts)
    assert state.buffer() == live(schedule.buffer)
    assert [ticket.number for ticket in state.taken] == schedule.taken
    assert [tuple(ticket.number for ticket in step.tickets) for step in state.steps] == schedule.steps
    waiting = {ticket.number for ticket in (*state.finished, *state.taken)}
    assert state.files.keys() == waiting.union(*schedule.steps)


@given(sizes, seeds, st.integers(0, 200))
def test_a_run_that_is_folded_goes_on_with_every_group(size, seed, moves):
    schedule = Schedule(size, seed)
    schedule.run(moves)
    state = fold(RunState(), schedule.facts)
    groups = {
        ticket.group_id: Group(
            group_id=ticket.group_id,
            task_id="task",
            ticket=ticket.number,
            admitted_version=ticket.admitted_version,
            trajectories=(),
        )
        for ticket in (*state.finished, *state.taken)
    }
    buffer = SlotBuffer.restore(state.buffer(), groups, groups_per_step=size[0], max_staleness=size[1])
    for ticket in state.taken:
        assert buffer.retake(ticket.number).ticket == ticket.number
    again = Schedule(size, seed)
    again.buffer, again.served, again.taken = buffer, buffer.version, [ticket.number for ticket in state.taken]
    again.run(300)
    assert buffer.version > state.version


@given(sizes, seeds, st.integers(20, 200), st.randoms())
def test_versions_that_are_given_up_return_their_groups(size, seed, moves, choice):
    schedule = Schedule(size, seed)
    schedule.run(moves)
    whole = fold(RunState(), schedule.facts)
    version = choice.randint(0, whole.version)
    returned = [number for step in schedule.steps[version:] for number in step]
    state = fold(whole, [Resumed(step=0, replayed=version, returned=tuple(returned))])
    assert state.version == version
    assert len(state.steps) == version
    if version < whole.version:
        wanted = {*returned, *(ticket.number for ticket in (*whole.finished, *whole.taken))}
        assert {ticket.number for ticket in state.finished} == wanted
        assert not state.taken
    else:
        assert state == whole
    assert state.num_trained == sum(map(len, schedule.steps[:version]))


def test_a_group_whose_file_is_gone_is_played_again_and_may_be_finished_again():
    facts = [Admitted(ticket=0, task="t", version=0), ready(0), GroupTaken(ticket=0, version=0)]
    state = fold(RunState(), [*facts, Resumed(step=0, restarted=(0,))])
    assert [ticket.number for ticket in state.in_flight] == [0]
    assert not state.files
    state = fold(state, [ready(0), GroupTaken(ticket=0, version=0), made(1)])
    assert [step.version for step in state.steps] == [1]


def test_steps_are_kept_back_to_the_oldest_checkpoint():
    facts = []
    for version in range(6):
        facts += [Admitted(ticket=version, task="t", version=version), ready(version)]
        facts += [GroupTaken(ticket=version, version=version), made(version + 1)]
        if version in (1, 3):
            facts.append(CheckpointWritten(step=version + 1, version=version + 1, lineage="0001-a", files={}))
    state = fold(RunState(), facts)
    assert [step.version for step in state.steps] == [1, 2, 3, 4, 5, 6]
    state = fold(state, [CheckpointDeleted(step=2)])
    assert [step.version for step in state.steps] == [5, 6]
    assert state.files.keys() == {4, 5}
    assert [checkpoint.step for checkpoint in state.checkpoints] == [4]


def test_checkpoints_of_versions_that_are_given_up_are_not_resumed_from():
    facts = []
    for version in range(3):
        facts += [Admitted(ticket=version, task="t", version=version), ready(version)]
        facts += [GroupTaken(ticket=version, version=version), made(version + 1)]
    facts += [CheckpointWritten(step=step, version=step, lineage="0001-a", files={}) for step in (1, 3)]
    state = fold(RunState(), [*facts, Resumed(step=1, replayed=1, returned=(2,))])
    assert [checkpoint.step for checkpoint in state.checkpoints] == [1]
    state = fold(state, [LineageOpened(lineage="0002-b", version=2, parent="0001-a")])
    assert (state.lineage, state.version) == ("0002-b", 2)


@pytest.mark.parametrize(
    "facts",
    [
        [Admitted(ticket=1, task="t", version=0)],
        [ready(0)],
        [GroupLost(ticket=0, reason="sandbox")],
        [Admitted(ticket=0, task="t", version=0), GroupTaken(ticket=0, version=0)],
        [Admitted(ticket=0, task="t", version=0), ready(0), ready(0)],
        [Admitted(ticket=0, task="t", version=0), ready(0), GroupTaken(ticket=0, version=1)],
        [made(2)],
        [Resumed(step=0, restarted=(0,))],
    ],
)
def test_facts_that_contradict_each_other_are_refused(facts):
    with pytest.raises(IntegrityError, match="contradicts itself"):
        fold(RunState(), facts)
