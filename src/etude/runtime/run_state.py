"""Where a run stands, as its controllers' facts say: what a checkpoint keeps, and what is folded over it."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from etude.errors import IntegrityError
from etude.rollout.buffer import BufferState, Ticket
from etude.telemetry.events import (
    Admitted,
    CheckpointDeleted,
    CheckpointWritten,
    GroupLost,
    GroupReady,
    GroupTaken,
    LineageOpened,
    Resumed,
    SandboxCreated,
    SandboxDestroyed,
    VersionMade,
)


class GroupFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where the file of a finished group lies."""

    key: str
    digest: str
    """sha256."""


class StepMade(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer step that can be repeated."""

    version: int
    """That it made."""
    tickets: tuple[Ticket, ...]
    """Of its groups, in their order."""


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is kept."""

    step: int
    files: dict[str, str]
    """sha256 by key."""
    num_bytes: int = 0


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands. Tickets are sorted by number, those of a step are in its order."""

    lineage: str = ""
    """Empty before anything was published."""
    version: int = 0
    """Policy version that the step being built starts from."""
    next_number: int = 0
    in_flight: tuple[Ticket, ...] = ()
    """Admitted and unfinished."""
    finished: tuple[Ticket, ...] = ()
    """Finished, and in no step yet."""
    taken: tuple[Ticket, ...] = ()
    """In the step being built."""
    steps: tuple[StepMade, ...] = ()
    """Made since the oldest checkpoint that is kept."""
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    """Oldest first."""
    files: dict[int, GroupFile] = {}
    """Of all groups that are finished, taken or in one of the steps, by ticket."""
    num_trained: int = 0
    lost: dict[str, int] = {}
    sandboxes: tuple[str, ...] = ()
    """Created and not destroyed."""

    def buffer(self) -> BufferState:
        """Return what a slot buffer goes on from, once every sampler serves this version."""
        waiting = sorted((*self.finished, *self.taken), key=_number)
        return BufferState(
            version=self.version,
            served_version=self.version,
            next_number=self.next_number,
            in_flight=self.in_flight,
            finished=tuple(waiting),
            num_trained=self.num_trained,
            lost=self.lost,
        )


def fold(state: RunState, facts: Iterable[msgspec.Struct]) -> RunState:
    """Return where a run stands after these facts; raise `IntegrityError` when they contradict each other."""
    folded = RunFold(state)
    for fact in facts:
        folded.apply(fact)
    return folded.state()


class RunFold:
    """A run's state while facts arrive."""

    def __init__(self, state: RunState) -> None:
        self._lineage = state.lineage
        self._version = state.version
        self._next_number = state.next_number
        self._in_flight = {ticket.number: ticket for ticket in state.in_flight}
        self._finished = {ticket.number: ticket for ticket in state.finished}
        self._taken = {ticket.number: ticket for ticket in state.taken}
        self._steps = list(state.steps)
        self._checkpoints = {kept.step: kept for kept in state.checkpoints}
        self._files = dict(state.files)
        self._num_trained = state.num_trained
        self._lost = Counter(state.lost)
        self._sandboxes = dict.fromkeys(state.sandboxes)

    def state(self) -> RunState:
        """Return where the run stands."""
        return RunState(
            lineage=self._lineage,
            version=self._version,
            next_number=self._next_number,
            in_flight=tuple(sorted(self._in_flight.values(), key=_number)),
            finished=tuple(sorted(self._finished.values(), key=_number)),
            taken=tuple(self._taken.values()),
            steps=tuple(self._steps),
            checkpoints=tuple(self._checkpoints[step] for step in sorted(self._checkpoints)),
            files=dict(self._files),
            num_trained=self._num_trained,
            lost=dict(self._lost),
            sandboxes=tuple(self._sandboxes),
        )

    @property
    def lineage(self) -> str:
        """Of the newest version."""
        return self._lineage

    def apply(self, fact: msgspec.Struct) -> None:
        """Take one fact into account; those that say nothing of the state are passed over."""
        match fact:
            case Admitted() | GroupReady() | GroupLost() | GroupTaken():
                self._apply_to_ticket(fact)
            case VersionMade():
                self._make(fact)
            case LineageOpened():
                self._lineage = fact.lineage
            case Resumed():
                self._resume(fact)
            case CheckpointWritten():
                self._checkpoints[fact.step] = StoredCheckpoint(
                    step=fact.step, files=fact.files, num_bytes=fact.num_bytes
                )
            case CheckpointDeleted():
                self._checkpoints.pop(fact.step, None)
                self._forget_steps_before_the_oldest()
            case SandboxCreated():
                self._sandboxes[fact.sandbox] = None
            case SandboxDestroyed():
                self._sandboxes.pop(fact.sandbox, None)
            case _:
                pass

    def _apply_to_ticket(self, fact: Admitted | GroupReady | GroupLost | GroupTaken) -> None:
        number = fact.ticket
        match fact:
            case Admitted():
                _require(number == self._next_number, f"ticket {number} is admitted where {self._next_number} was due")
                self._next_number += 1
                self._in_flight[number] = Ticket(number=number, task_id=fact.task, admitted_version=fact.version)
            case GroupReady():
                self._finished[number] = _pop(number, "finished", self._in_flight)
                self._files[number] = GroupFile(key=fact.key, digest=fact.digest)
            case GroupTaken():
                _require(fact.version == self._version, f"ticket {number} is taken for version {fact.version}")
                self._taken[number] = _pop(number, "taken", self._finished)
            case GroupLost():
                _pop(number, "lost", self._in_flight, self._finished, self._taken)
                self._files.pop(number, None)
                self._lost[fact.reason] += 1

    def _make(self, fact: VersionMade) -> None:
        _require(fact.version == self._version + 1, f"version {fact.version} is made after version {self._version}")
        self._steps.append(StepMade(version=fact.version, tickets=tuple(self._taken.values())))
        self._num_trained += len(self._taken)
        self._taken = {}
        self._version = fact.version
        self._lineage = fact.lineage

    def _resume(self, fact: Resumed) -> None:
        """Give up the versions that were not repeated, and play again what has no file."""
        if fact.step + fact.replayed < self._version:
            self._roll_back(fact.step + fact.replayed)
        for number in fact.restarted:
            self._in_flight[number] = _pop(number, "played again", self._in_flight, self._finished, self._taken)
            self._files.pop(number, None)

    def _roll_back(self, version: int) -> None:
        given_up = [step for step in self._steps if step.version > version]
        self._steps = self._steps[: len(self._steps) - len(given_up)]
        self._checkpoints = {step: kept for step, kept in self._checkpoints.items() if step <= version}
        self._version = version
        for step in given_up:
            self._num_trained -= len(step.tickets)
            self._finished |= {ticket.number: ticket for ticket in step.tickets}
        self._finished |= self._taken
        self._taken = {}

    def _forget_steps_before_the_oldest(self) -> None:
        """Nobody repeats a step that every checkpoint has behind it."""
        if not self._checkpoints:
            return
        oldest = min(self._checkpoints)
        for step in self._steps:
            if step.version <= oldest:
                for ticket in step.tickets:
                    self._files.pop(ticket.number, None)
        self._steps = [step for step in self._steps if step.version > oldest]


def _pop(number: int, what: str, *places: dict[int, Ticket]) -> Ticket:
    for place in places:
        if number in place:
            return place.pop(number)
    raise _contradiction(f"ticket {number} is {what} without having been ready for it")


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - the condition is the point
    if not holds:
        raise _contradiction(otherwise)


def _contradiction(what: str) -> IntegrityError:
    return IntegrityError(f"the run's ledger contradicts itself: {what}; run etude verify on the run")


def _number(ticket: Ticket) -> int:
    return ticket.number
