"""Bringing a run back to where it stood; docs/design/0010-recovery.md says how and why."""

import hashlib
from collections.abc import Callable, Iterable

import msgspec

from etude.algorithm.staleness import newest_version
from etude.errors import IntegrityError, ObjectMissingError, RunError, StoreError
from etude.interfaces import ObjectStore
from etude.rollout.buffer import Ticket
from etude.runtime.checkpoints import CONTROLLER_FILE, Checkpoint, latest_checkpoint
from etude.runtime.journal import Journal, Log
from etude.runtime.run_state import RunFold, RunState, StepMade, StoredCheckpoint
from etude.store.groups import decode_group
from etude.telemetry.events import (
    Admitted,
    CheckpointDeleted,
    GroupLost,
    LineageOpened,
    Resumed,
    VersionMade,
)
from etude.training.client import TrainerClient
from etude.training.records import PublishRequest, RestoreRequest, StepRequest
from etude.types import Group, StepReport
from etude.weights.reader import read_head

_FORKED = "repeating the steps since the checkpoint gave other bytes than those that were published"
_GIVEN_UP = "version_given_up"
_FILE_MISSING = "file_missing"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the predecessors of a controller left in checkpoint and ledger."""

    state: RunState
    cursor: bytes | None = None
    """Of the task source at the checkpoint; None: the start."""
    admitted: tuple[str, ...] = ()
    """Tasks that were drawn since, in order."""
    seconds: float = 0.0
    """That training had taken."""


async def look_back(store: ObjectStore, log: Log, note: Callable[[str], None]) -> Found:
    """Return where the run stands: the newest checkpoint with the facts after it, or all facts.

    Raises:
        IntegrityError: The ledger is damaged or contradicts itself.
        StoreError: The run has a checkpoint, but no ledger.
    """
    checkpoint = await _checkpoint(store, note)
    if checkpoint is not None and not log.last:
        msg = "the run has checkpoints, but ledger/ is gone: restore it, or choose another run.url"
        raise StoreError(msg)
    admitted: list[str] = []
    folded = RunFold(checkpoint.state if checkpoint else RunState())
    async for fact in log.facts(checkpoint.position if checkpoint else None):
        folded.apply(fact)
        if isinstance(fact, Admitted):
            admitted.append(fact.task)
    return Found(
        state=folded.state(),
        cursor=checkpoint.cursor if checkpoint else None,
        admitted=tuple(admitted),
        seconds=checkpoint.seconds if checkpoint else 0.0,
    )


async def _checkpoint(store: ObjectStore, note: Callable[[str], None]) -> Checkpoint | None:
    try:
        return await latest_checkpoint(store)
    except IntegrityError as error:
        note(f"{error}; reading the whole ledger instead")
        return None


class Recovery:
    """Brings trainers, one after the other when they die, to where the run stands."""

    def __init__(
        self, store: ObjectStore, journal: Journal, *, groups_per_step: int, note: Callable[[str], None]
    ) -> None:
        """The journal has begun with what `look_back` found; `note` is told what people should know."""
        self._store = store
        self._journal = journal
        self._groups_per_step = groups_per_step
        self._note = note
        self._resumed = not journal.follows
        self._completed: StepReport | None = None
        self.repeated: list[StepReport] = []
        """Of the steps that were made again, by whichever trainer."""

    def completed(self) -> StepReport | None:
        """Return, once, the report of a step that was under way with all its groups, and was made by `bring_back`."""
        report, self._completed = self._completed, None
        return report

    async def bring_back(self, trainer: TrainerClient) -> None:
        """Bring a trainer that has just started to the run's newest version, and publish that.

        The first time, say what was found, and give up versions that cannot be repeated.

        Raises:
            StoreError: No checkpoint is intact, or the store failed.
            TrainerLostError: The trainer died again.
            RunError: The trainer refuses a step, or a group that is needed disappeared while the run went on.
        """
        base = await self._restore(trainer)
        if not self._resumed:
            await self._resume(base)
            self._resumed = True
        fork = await self._replay(trainer, base)
        await self._publish(trainer, fork)

    async def group(self, ticket: Ticket) -> Group:
        """Return a finished group; raise `IntegrityError` when its file is gone or not what was written."""
        return decode_group(await self._file(ticket))

    async def _file(self, ticket: Ticket) -> bytes:
        file = self._journal.state.files[ticket.number]
        try:
            data = await self._store.get(file.key)
        except ObjectMissingError as error:
            raise IntegrityError(str(error)) from error
        if hashlib.sha256(data).hexdigest() != file.digest:
            raise IntegrityError(f"{file.key} is not what was written")
        return data

    async def _restore(self, trainer: TrainerClient) -> int:
        """Have the trainer take over the newest intact checkpoint, and return its step; 0 is the start."""
        state = self._journal.state
        for checkpoint in reversed(state.checkpoints):
            try:
                await trainer.restore(_request(checkpoint))
            except IntegrityError as error:
                self._note(f"checkpoint {checkpoint.step} is damaged, going back to the one before: {error}")
                self._journal.record(CheckpointDeleted(step=checkpoint.step))
            else:
                return checkpoint.step
        if state.version and (not state.steps or state.steps[0].version != 1):
            steps = ", ".join(str(checkpoint.step) for checkpoint in state.checkpoints)
            raise StoreError(f"no checkpoint of the run is intact (there were: {steps or 'none'}): restore one")
        await trainer.restore(RestoreRequest(step=0, digests={}))
        return 0

    async def _resume(self, base: int) -> None:
        """Record what was found, and make of the state one that can be gone on from."""
        state = self._journal.state
        last = base
        for step in state.steps:
            if step.version == last + 1 and not await self._missing(step.tickets):
                last = step.version
        returned = [ticket for step in state.steps if step.version > last for ticket in step.tickets]
        waiting = [*state.finished, *state.taken]
        missing = await self._missing([*waiting, *returned])
        lost = {ticket.number: _FILE_MISSING for ticket in returned if ticket.number in missing}
        if last < state.version:
            self._note(f"versions {last + 1} to {state.version} are given up: groups that they came of are missing")
        # Whatever was drawn with a version that is given up would count as drawn with the one made in its place. Not
        # only now: this may be the second time, after a crash in the middle of the first.
        later = await self._drawn_later(last, [*waiting, *returned], missing)
        admitted = (*state.in_flight, *waiting, *returned)
        later |= {ticket.number for ticket in admitted if ticket.admitted_version > last}
        lost |= dict.fromkeys(later - lost.keys(), _GIVEN_UP)
        again = {ticket.number for ticket in state.in_flight} | {
            ticket.number for ticket in waiting if ticket.number in missing
        }
        self._journal.record(
            Resumed(
                step=base,
                replayed=last - base,
                restarted=tuple(sorted(again - lost.keys())),
                returned=tuple(ticket.number for ticket in returned),
            )
        )
        for number, reason in sorted(lost.items()):
            self._journal.record(GroupLost(ticket=number, reason=reason))
        await self._journal.flush()

    async def _missing(self, tickets: Iterable[Ticket]) -> set[int]:
        """Return the numbers of those whose group cannot be read."""
        missing: set[int] = set()
        for ticket in tickets:
            try:
                await self._file(ticket)
            except IntegrityError as error:
                self._note(f"the group of ticket {ticket.number} cannot be used: {error}")
                missing.add(ticket.number)
        return missing

    async def _drawn_later(self, version: int, tickets: Iterable[Ticket], missing: set[int]) -> set[int]:
        """Return the numbers of those with tokens of later versions, which will be made again with other weights."""
        later: set[int] = set()
        for ticket in tickets:
            if ticket.number not in missing:
                newest = newest_version((await self.group(ticket)).trajectories)
                if newest is not None and newest > version:
                    later.add(ticket.number)
        return later

    async def _replay(self, trainer: TrainerClient, base: int) -> str:
        """Repeat the steps since the checkpoint; return why what follows needs a lineage of its own, empty if not."""
        state = self._journal.state
        head = await read_head(self._store)
        named = head.version if head is not None and head.lineage == state.lineage else -1
        fork = "" if base != named or (await trainer.compare()).is_head else _FORKED
        for step in state.steps:
            if step.version > base:
                await self._repeat(trainer, step, StepRequest(publish=False, replayed=True, lineage=state.lineage))
                if step.version == named and not (await trainer.compare()).is_head:
                    fork = _FORKED
        if state.taken and (len(state.taken) >= self._groups_per_step or named > state.version):
            # It may have been made, and published: only the same groups make the same bytes again.
            step = StepMade(version=state.version + 1, tickets=state.taken)
            report = await self._repeat(trainer, step, StepRequest(publish=False, lineage=state.lineage))
            self._journal.record(VersionMade(lineage=state.lineage, version=report.version, step=report.step))
            self._completed = report
            await self._journal.flush()
        return fork

    async def _publish(self, trainer: TrainerClient, fork: str) -> None:
        lineage = self._journal.state.lineage
        settled = await trainer.publish(PublishRequest(fork=fork))
        if settled.lineage != lineage:
            reason = settled.opened or "it was opened just before a crash"
            self._journal.record(
                LineageOpened(lineage=settled.lineage, version=settled.version, parent=lineage, reason=reason)
            )
            await self._journal.flush()
            if lineage:
                self._note(f"version {settled.version} goes on in lineage {settled.lineage}: {reason}")

    async def _repeat(self, trainer: TrainerClient, step: StepMade, request: StepRequest) -> StepReport:
        for ticket in step.tickets:
            try:
                group = await self.group(ticket)
            except IntegrityError as error:
                msg = f"step {step.version} cannot be repeated ({error}): run the same command again, it goes back"
                raise RunError(msg) from error
            await trainer.forward_backward([group])
        report = await trainer.optim_step(request)
        if report.version != step.version:
            raise RunError(f"the trainer made version {report.version} where {step.version} was due; see its log")
        self.repeated.append(report)
        return report


def _request(checkpoint: StoredCheckpoint) -> RestoreRequest:
    named = {key.rpartition("/")[2]: digest for key, digest in checkpoint.files.items()}
    return RestoreRequest(
        step=checkpoint.step, digests={name: digest for name, digest in named.items() if name != CONTROLLER_FILE}
    )
