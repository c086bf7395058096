"""Training: four loops that meet in the slot buffer.

    task source ──► admit ──► roll out ──► finished groups ──► train ──► publish
                      ▲                                          │
                      └──────── served: samplers swapped ◄───────┘

    loop       waits for                                    who unblocks it
    admit      a free slot (`SlotBuffer.wait_for_slot`)     served, a lost group
    roll out   samplers, sandboxes, graders                 each has its own deadline
    train      a group that may be taken (`take`),          roll out,
               a trainer that died (`_bring_back`)          the supervisor
    served     nothing: looks every `weights.poll_s`        -

The trainer is the finite clock: when it has taken its steps, or the tasks are solved, the other loops are stopped. Any
loop that ends by itself ends the run with its error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

from etude.algorithm.advantages import centred, is_graded, standardised
from etude.algorithm.staleness import group_staleness
from etude.config import RunConfig
from etude.errors import NoSignalError, RunError, TaskError, TrainerLostError
from etude.interfaces import MetricSink
from etude.rollout.buffer import SlotBuffer, Ticket
from etude.rollout.group import GroupPlan, PlayedGroup
from etude.rollout.worker import RolloutWorker
from etude.runtime.checkpoints import Checkpoint, delete_old_checkpoints, write_checkpoint
from etude.runtime.directory import RunDirectory
from etude.runtime.fleet import Fleet
from etude.runtime.journal import Journal
from etude.runtime.recovery import Found, Recovery
from etude.runtime.step_metrics import Rate, of_groups, of_samplers
from etude.tasks.source import SeededTaskSource
from etude.telemetry.console import Console
from etude.telemetry.events import Admitted, GroupLost, GroupTaken, VersionMade
from etude.telemetry.waits import waiting
from etude.training.client import TrainerClient
from etude.training.records import PublishRequest, StepRequest
from etude.types import Group, StepReport, Task
from etude.weights.reader import read_head

_FLAT_STEPS = 5
"""Steps in which all attempts at a task had the same reward, after which a run stops."""

_SERVED_WITHIN_S = 120.0

_DRAINED_WITHIN_S = 120.0

_GROUP_WITHIN_S = 86400.0
"""Every attempt has deadlines of its own; this one is for what nobody thought of."""

Reconnect = Callable[[], Awaitable[TrainerClient]]
"""Waits for the trainer's next life."""


class Controller:
    """Runs the training stage of one run."""

    def __init__(
        self,
        *,
        run: RunDirectory,
        config: RunConfig,
        fleet: Fleet,
        trainer: TrainerClient,
        reconnect: Reconnect,
        journal: Journal,
        found: Found,
        recovery: Recovery,
        tasks: list[Task],
        sink: MetricSink,
        console: Console,
        lag: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Go on from what was `found`, to which `recovery` has brought the trainer.

        `lag` says by how many seconds the event loop was late since it was asked before.
        """
        self._run = run
        self._config = config
        self._fleet = fleet
        self._trainer = trainer
        self._reconnect = reconnect
        self._journal = journal
        self._found = found
        self._recovery = recovery
        self._tasks = {task.task_id: task for task in tasks}
        self._source = SeededTaskSource(tasks, seed=config.run.seed)
        self._sink = sink
        self._console = console
        self._lag = lag
        self._groups: list[Group] = []
        """Of the step being built, in its order."""
        self._num_sent = 0
        """Of them that the trainer has."""
        self._is_lost = False
        """The trainer is gone, and not yet back."""
        self._waited_s = 0.0
        self._played: list[PlayedGroup] = []
        self._flat_rewards: list[float] = []
        """Mean rewards of the newest steps, as long as all attempts at a task had the same."""
        self._draining = asyncio.Event()
        self._started = perf_counter()
        self._drawn = Rate(0.0)

    @property
    def seconds(self) -> float:
        """That the stage took so far, over all the times that it was started."""
        return self._found.seconds + perf_counter() - self._started

    def drain(self) -> None:
        """Ask for an orderly end: the step under way is finished and saved, rollouts in flight are given up."""
        self._draining.set()

    async def train(self) -> bool:
        """Train to the configured number of steps, or until the tasks are solved; return False when drained before.

        Raises:
            NoSignalError: In the last steps all attempts at a task had the same reward, and it was not always the best.
            HarnessError: The harness cannot start in any sandbox.
            RunError: No group is played to a reward, or a part of the run cannot go on; the message names it.
        """
        buffer = await self._open_buffer()
        self._drawn = Rate(of_samplers(await self._fleet.statuses())["sampling/tokens_drawn"])
        await self._record_what_a_crash_left_out(buffer)
        if self._is_trained(buffer):
            if buffer.version not in (checkpoint.step for checkpoint in self._journal.state.checkpoints):
                await self._insist(self._checkpoint)
            return True
        worker = RolloutWorker(
            player=self._fleet.player,
            buffer=buffer,
            plan=self._plan(),
            concurrency=self._config.environment.concurrency,
            on_admit=self._note_admitted,
            on_group=self._keep_group,
        )
        async with asyncio.TaskGroup() as loops:
            playing = loops.create_task(worker.run(self._source, resumed=self._tasks), name="roll out")
            serving = loops.create_task(self._watch_served(buffer), name="served")
            while not self._is_over(buffer):
                await self._take_step(buffer)
                if self._is_over(buffer) or buffer.version % self._config.checkpoint.every == 0:
                    await self._insist(self._checkpoint)
            worker.stop()
            async with waiting("rollouts to end", owner="train", on="rollouts", deadline_s=_DRAINED_WITHIN_S):
                await playing
            # What follows, an evaluation say, looks at the head: it must name the version that was made last.
            await self._insist(self._publication)
            serving.cancel()
        return self._is_trained(buffer)

    def _is_over(self, buffer: SlotBuffer) -> bool:
        return self._is_trained(buffer) or self._draining.is_set()

    def _is_trained(self, buffer: SlotBuffer) -> bool:
        return self._is_solved or buffer.version >= self._config.trainer.steps

    @property
    def _is_solved(self) -> bool:
        """Whether every attempt of the last steps had the best reward that there is."""
        return len(self._flat_rewards) >= _FLAT_STEPS and min(self._flat_rewards) == 1.0

    async def _publication(self) -> None:
        """Return when the newest version is published."""
        await self._trainer.publish(PublishRequest())

    async def _open_buffer(self) -> SlotBuffer:
        """Return the buffer to go on with, and bring the task source and the step under way to where they were."""
        await self._insist(self._find_trainer)
        head = await read_head(self._run.store)
        assert head is not None
        await self._fleet.wait_until_served(head)
        state = self._journal.state
        if self._found.cursor is not None:
            self._source.restore(self._found.cursor)
        for name in self._found.admitted:
            task = self._source.next_task()
            if task.task_id != name:
                msg = f"the ledger says that task {name} was given out, and the task source gives {task.task_id}"
                raise TaskError(f"{msg}: bring the task directory back to what it was, or start a new run")
        groups = [await self._recovery.group(ticket) for ticket in (*state.finished, *state.taken)]
        buffer = SlotBuffer.restore(
            state.buffer(),
            {group.group_id: group for group in groups},
            groups_per_step=self._config.rollout.groups_per_step,
            max_staleness=self._config.rollout.max_staleness,
            stall_s=self._config.supervision.stall_s,
        )
        self._groups = [buffer.retake(ticket.number) for ticket in state.taken]
        return buffer

    async def _find_trainer(self) -> None:
        """Raise `TrainerLostError` unless the trainer is where it was brought: it may have died since."""
        status = await self._trainer.health()
        if status.version != self._journal.state.version or status.pending_groups:
            raise TrainerLostError(f"the trainer is at version {status.version}, it was started anew")

    async def _record_what_a_crash_left_out(self, buffer: SlotBuffer) -> None:
        """Record metrics of steps that were made and not told before the run was interrupted."""
        self._recovery.completed()
        told = self._run.newest_step()
        for report in self._recovery.repeated:
            if report.step > told:
                await self._record(buffer, report, {})

    def _plan(self) -> GroupPlan:
        rollout = self._config.rollout
        return GroupPlan(
            seed=self._config.run.seed,
            size=rollout.group_size,
            min_survivors=rollout.min_survivors,
            retries=rollout.retries,
        )

    def _note_admitted(self, ticket: Ticket) -> None:
        self._journal.record(Admitted(ticket=ticket.number, task=ticket.task_id, version=ticket.admitted_version))

    async def _keep_group(self, ticket: Ticket, played: PlayedGroup) -> None:
        """Return when a finished group survives a crash."""
        self._played.append(played)
        if played.lost:
            self._journal.record(GroupLost(ticket=ticket.number, reason=played.lost))
        else:
            await self._fleet.recorder.keep_group(played.group, self._advantages(played.group))

    def _advantages(self, group: Group) -> list[float | None]:
        """Return advantages for the record; the trainer computes its own in the same way."""
        rewards = [one.reward if is_graded(one) else None for one in group.trajectories]
        known = [reward for reward in rewards if reward is not None]
        if self._config.algorithm.advantage == "standardised":
            made = iter(standardised(known))
        else:
            made = iter(centred(known, group_size=self._config.rollout.group_size))
        return [None if reward is None else next(made) for reward in rewards]

    async def _take_step(self, buffer: SlotBuffer) -> None:
        """Train on groups as they become ready, and make the next version, however often the trainer dies over it."""
        version = buffer.version
        report = None
        while report is None:
            try:
                await self._fill_step(buffer)
                report = await self._trainer.optim_step(StepRequest(lineage=self._journal.lineage))
                made = VersionMade(lineage=self._journal.lineage, version=report.version, step=report.step)
                self._journal.record(made)
            except TrainerLostError as error:
                await self._bring_back(error)
                report = self._recovery.completed()
        await self._journal.flush()
        staleness = [group_staleness(group, version) for group in self._groups]
        consumed = {"trainer/wait_s": self._waited_s, "staleness/max_versions": float(max(staleness))}
        self._groups, self._num_sent, self._waited_s = [], 0, 0.0
        buffer.trained(report.version)
        await self._record(buffer, report, consumed)

    async def _fill_step(self, buffer: SlotBuffer) -> None:
        """Send the trainer all groups of the step that it does not have; the ledger has them all when this returns."""
        await self._send()
        while len(self._groups) < buffer.groups_per_step:
            if self._config.run.deterministic:
                rest = [await self._taken(buffer) for _ in range(len(self._groups), buffer.groups_per_step)]
                rest.sort(key=lambda group: group.ticket)
            else:
                rest = [await self._taken(buffer)]
            for group in rest:
                self._journal.record(GroupTaken(ticket=group.ticket, version=buffer.version))
            self._groups += rest
            await self._send()
        await self._journal.flush()

    async def _taken(self, buffer: SlotBuffer) -> Group:
        before = perf_counter()
        async with waiting("a group", owner="train", on="roll out", deadline_s=_GROUP_WITHIN_S):
            group = await buffer.take(buffer.version)
        self._waited_s += perf_counter() - before
        return group

    async def _send(self) -> None:
        while self._num_sent < len(self._groups):
            await self._trainer.forward_backward([self._groups[self._num_sent]])
            self._num_sent += 1

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what needs the trainer again until it did not die over it."""
        while True:
            try:
                return await work()
            except TrainerLostError as error:
                await self._bring_back(error)

    async def _bring_back(self, error: TrainerLostError) -> None:
        """Wait for the trainer's next life, and bring it to where the run stands; rollouts go on meanwhile."""
        self._console.note(f"{error}; rollouts go on until it is back")
        self._is_lost = True
        while self._is_lost:
            self._trainer = await self._reconnect()
            try:
                await self._recovery.bring_back(self._trainer)
            except TrainerLostError as again:
                self._console.note(f"{again}; waiting for it once more")
            else:
                self._is_lost = False
        self._num_sent = 0
        self._console.note(f"the trainer is back at version {self._journal.state.version}")

    async def _record(self, buffer: SlotBuffer, report: StepReport, consumed: dict[str, float]) -> None:
        played, self._played = self._played, []
        samplers = of_samplers(await self._fleet.statuses())
        row = {
            "stage": "train",
            "step": report.step,
            "version": report.version,
            "lineage": self._journal.lineage,
            "trainer/loss": report.loss,
            "trainer/groups_count": float(report.num_groups),
            "trainer/samples_count": float(report.num_samples),
            "trainer/step_s": report.seconds,
            "tokens/trained": float(report.tokens_trained),
            "rollout/groups_in_flight_count": float(len(buffer.in_flight)),
            "rollout/groups_queued_count": float(buffer.num_ready),
            "runtime/loop_lag_s": self._lag(),
            "sampling/tokens_per_s": self._drawn.per_second(samplers["sampling/tokens_drawn"]),
            **report.metrics,
            **consumed,
            **of_groups(played),
            **samplers,
            **self._fleet.canaries.metrics(),
        }
        self._sink.record(row)
        self._console.step(row, total=self._config.trainer.steps)
        self._check_signal(report)

    def _check_signal(self, report: StepReport) -> None:
        """Say that the tasks are solved, or raise `NoSignalError` when there is nothing to learn from them."""
        reward = report.metrics.get("reward/mean", 0.0)
        is_flat = report.metrics.get("reward/equal_groups_fraction", 0.0) >= 1.0
        self._flat_rewards = [*self._flat_rewards, reward] if is_flat else []
        if self._is_solved:
            self._console.note(
                f"in the last {_FLAT_STEPS} steps every attempt got the reward 1: the tasks are solved, so training "
                f"ends at step {report.step} of {self._config.trainer.steps}; to go on, start a run with harder ones"
            )
        elif len(self._flat_rewards) >= _FLAT_STEPS:
            msg = (
                f"in the last {_FLAT_STEPS} steps all attempts at a task got the same reward (mean {reward:.3g}), so "
                f"there is nothing to learn from. Read some rollouts (etude show {self._run.url}): the harness or the "
                "tests may be broken; if not, take tasks that this policy solves sometimes but not always"
            )
            raise NoSignalError(msg)

    async def _watch_served(self, buffer: SlotBuffer) -> None:
        """Tell the buffer what the samplers serve; raise `RunError` when they stop following the trainer."""
        behind_since = perf_counter()
        while True:
            served = await self._fleet.served_version(self._journal.lineage)
            if served is not None:
                buffer.served(served)
            # A sampler that is down is the supervisor's affair, which has deadlines of its own.
            if served == buffer.version or self._is_lost or not self._fleet.roster.is_complete:
                behind_since = perf_counter()
            if perf_counter() - behind_since > _SERVED_WITHIN_S:
                msg = f"a sampler still serves version {served}, but the trainer is at {buffer.version}"
                raise RunError(f"{msg}; see {self._fleet.logs}/sampler-*.log")
            await asyncio.sleep(self._config.weights.poll_s / 2)

    async def _checkpoint(self) -> None:
        """Save what the stage resumes from."""
        files = await self._trainer.checkpoint()
        await self._fleet.recorder.flush()
        await self._run.keep_metrics()
        state = self._journal.state
        checkpoint = Checkpoint(
            step=state.version,
            cursor=self._source.cursor(),
            state=state,
            position=self._journal.position,
            seconds=self.seconds,
        )
        await write_checkpoint(self._run.store, self._journal, checkpoint, files)
        for warning in await delete_old_checkpoints(self._run.store, self._journal, self._config.checkpoint):
            self._console.note(f"warning: {warning}")
