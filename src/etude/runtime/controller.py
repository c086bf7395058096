"""Training: four loops that meet in the slot buffer.

    task source ──► admit ──► roll out ──► finished groups ──► train ──► publish
                      ▲                                          │
                      └──────── served: samplers swapped ◄───────┘

    loop       waits for                                    who unblocks it
    admit      a free slot (`SlotBuffer.wait_for_slot`)     served, a lost group
    roll out   samplers, sandboxes, graders                 each has its own deadline
    train      a group that may be taken (`take`)           roll out
    served     nothing: looks every `weights.poll_s`        -

The trainer is the finite clock: when it has taken its steps the other loops are stopped. Any loop that ends by itself
ends the run with its error.
"""

import asyncio
from time import perf_counter

from etude.algorithm.advantages import centred, is_graded, standardised
from etude.algorithm.staleness import group_staleness
from etude.config import RunConfig
from etude.errors import NoSignalError, RunError
from etude.interfaces import MetricSink
from etude.rollout.buffer import SlotBuffer, Ticket
from etude.rollout.group import GroupPlan, PlayedGroup
from etude.rollout.worker import RolloutWorker
from etude.runtime.checkpoints import Checkpoint, latest_checkpoint, write_checkpoint
from etude.runtime.directory import RunDirectory
from etude.runtime.fleet import Fleet
from etude.runtime.step_metrics import Rate, of_groups, of_samplers
from etude.store.groups import decode_group, group_key
from etude.tasks.source import SeededTaskSource
from etude.telemetry.console import Console
from etude.training.client import TrainerClient
from etude.types import Group, StepReport, Task
from etude.weights.reader import read_head

_HOPELESS_STEPS = 5
"""Steps in which every rollout had the same reward, after which a run stops."""

_SERVED_WITHIN_S = 120.0


class Controller:
    """Runs the training stage of one run."""

    def __init__(
        self,
        *,
        run: RunDirectory,
        config: RunConfig,
        fleet: Fleet,
        trainer: TrainerClient,
        tasks: list[Task],
        sink: MetricSink,
        console: Console,
    ) -> None:
        self._run = run
        self._config = config
        self._fleet = fleet
        self._trainer = trainer
        self._tasks = {task.task_id: task for task in tasks}
        self._source = SeededTaskSource(tasks, seed=config.run.seed)
        self._sink = sink
        self._console = console
        self._lineage = ""
        self._played: list[PlayedGroup] = []
        self._steps_without_signal = 0
        self._draining = asyncio.Event()
        self._seconds_before = 0.0
        self._started = perf_counter()
        self._drawn = Rate(0.0)

    @property
    def seconds(self) -> float:
        """That the stage took so far, over all the times that it was started."""
        return self._seconds_before + perf_counter() - self._started

    def drain(self) -> None:
        """Ask for an orderly end: the step under way is finished and saved, rollouts in flight are given up."""
        self._draining.set()

    async def train(self) -> bool:
        """Train to the configured number of steps and return True, or False when drained before.

        Raises:
            NoSignalError: Every reward of the last steps was the same.
            HarnessError: The harness cannot start in any sandbox.
            RunError: No group is played to a reward, or a part of the run cannot go on; the message names it.
        """
        buffer, step = await self._open_buffer()
        total = self._config.trainer.steps
        if step >= total:
            return True
        self._drawn = Rate(of_samplers(await self._fleet.router.status())["sampling/tokens_drawn"])
        worker = RolloutWorker(
            player=self._fleet.player,
            buffer=buffer,
            plan=self._plan(),
            concurrency=self._config.environment.concurrency,
            on_group=self._note_group,
        )
        async with asyncio.TaskGroup() as loops:
            playing = loops.create_task(worker.run(self._source, resumed=self._tasks), name="roll out")
            serving = loops.create_task(self._watch_served(buffer), name="served")
            while step < total and not self._draining.is_set():
                step = await self._take_step(buffer)
                if step % self._config.checkpoint.every == 0 or step == total or self._draining.is_set():
                    await self._checkpoint(buffer, step)
            worker.stop()
            await playing
            serving.cancel()
        return step >= total

    async def _open_buffer(self) -> tuple[SlotBuffer, int]:
        """Return the buffer and the step to go on from, with the task source where it was."""
        status = await self._trainer.health()
        head = await read_head(self._run.store)
        if head is None or head.version != status.version:
            msg = f"weights/head of {self._run.url} is not the trainer's version {status.version}; see logs/trainer.log"
            raise RunError(msg)
        self._lineage = head.lineage
        shape = {
            "groups_per_step": self._config.rollout.groups_per_step,
            "max_staleness": self._config.rollout.max_staleness,
        }
        checkpoint = await latest_checkpoint(self._run.store)
        await self._fleet.wait_until_served(head)
        if checkpoint is None:
            return SlotBuffer(**shape, version=status.version), status.step
        self._source.restore(checkpoint.cursor)
        self._seconds_before = checkpoint.seconds
        keys = [group_key(ticket.admitted_version, ticket.group_id) for ticket in checkpoint.buffer.finished]
        groups = [decode_group(await self._run.store.get(key)) for key in keys]
        buffer = SlotBuffer.restore(checkpoint.buffer, {group.group_id: group for group in groups}, **shape)
        buffer.served(status.version)
        return buffer, status.step

    def _plan(self) -> GroupPlan:
        rollout = self._config.rollout
        return GroupPlan(
            seed=self._config.run.seed,
            size=rollout.group_size,
            min_survivors=rollout.min_survivors,
            retries=rollout.retries,
        )

    def _note_group(self, ticket: Ticket, played: PlayedGroup) -> None:
        del ticket
        self._played.append(played)
        if not played.lost:
            self._fleet.recorder.group(played.group, self._advantages(played.group))

    def _advantages(self, group: Group) -> list[float | None]:
        """Return advantages for the record; the trainer computes its own in the same way."""
        rewards = [one.reward if is_graded(one) else None for one in group.trajectories]
        known = [reward for reward in rewards if reward is not None]
        if self._config.algorithm.advantage == "standardised":
            made = iter(standardised(known))
        else:
            made = iter(centred(known, group_size=self._config.rollout.group_size))
        return [None if reward is None else next(made) for reward in rewards]

    async def _take_step(self, buffer: SlotBuffer) -> int:
        """Train on groups as they become ready, make the next version, and return the step that made it."""
        version = buffer.version
        waited = 0.0
        staleness: list[int] = []
        for _ in range(buffer.groups_per_step):
            before = perf_counter()
            group = await buffer.take(version)
            waited += perf_counter() - before
            staleness.append(group_staleness(group, version))
            await self._trainer.forward_backward([group])
        report = await self._trainer.optim_step()
        buffer.trained(report.version)
        consumed = {"trainer/wait_s": waited, "staleness/max_versions": float(max(staleness))}
        await self._record(buffer, report, consumed)
        return report.step

    async def _record(self, buffer: SlotBuffer, report: StepReport, consumed: dict[str, float]) -> None:
        played, self._played = self._played, []
        samplers = of_samplers(await self._fleet.router.status())
        row = {
            "stage": "train",
            "step": report.step,
            "version": report.version,
            "lineage": self._lineage,
            "trainer/loss": report.loss,
            "trainer/groups_count": float(report.num_groups),
            "trainer/samples_count": float(report.num_samples),
            "trainer/step_s": report.seconds,
            "tokens/trained": float(report.tokens_trained),
            "rollout/groups_in_flight_count": float(len(buffer.in_flight)),
            "rollout/groups_queued_count": float(buffer.num_ready),
            "sampling/tokens_per_s": self._drawn.per_second(samplers["sampling/tokens_drawn"]),
            **report.metrics,
            **consumed,
            **of_groups(played),
            **samplers,
        }
        self._sink.record(row)
        self._console.step(row, total=self._config.trainer.steps)
        self._check_signal(report)

    def _check_signal(self, report: StepReport) -> None:
        """Stop a run that has nothing to learn from."""
        equal = report.metrics.get("reward/equal_groups_fraction", 0.0) >= 1.0
        self._steps_without_signal = self._steps_without_signal + 1 if equal else 0
        if self._steps_without_signal >= _HOPELESS_STEPS:
            reward = report.metrics["reward/mean"]
            msg = (
                f"in the last {_HOPELESS_STEPS} steps all attempts at a task got the same reward (mean {reward:.3g}), "
                f"so there is nothing to learn from. Read some rollouts (etude show {self._run.url}): "
            )
            hint = (
                "the tasks are solved; take harder ones"
                if reward > 0
                else ("the harness or the tests may be broken, or the tasks too hard for this policy; take easier ones")
            )
            raise NoSignalError(msg + hint)

    async def _watch_served(self, buffer: SlotBuffer) -> None:
        """Tell the buffer what the samplers serve; raise `RunError` when they stop following the trainer."""
        behind_since = perf_counter()
        while True:
            served = await self._fleet.served_version(self._lineage)
            if served is not None:
                buffer.served(served)
            if served == buffer.version:
                behind_since = perf_counter()
            if perf_counter() - behind_since > _SERVED_WITHIN_S:
                msg = f"a sampler still serves version {served}, but the trainer is at {buffer.version}"
                raise RunError(f"{msg}; see {self._fleet.logs}/sampler-*.log")
            await asyncio.sleep(self._config.weights.poll_s / 2)

    async def _checkpoint(self, buffer: SlotBuffer, step: int) -> None:
        """Save what the stage resumes from; the pointer to it is written last."""
        await self._trainer.checkpoint()
        state, cursor = buffer.state(), self._source.cursor()
        await self._fleet.recorder.flush()
        await self._run.keep_metrics()
        checkpoint = Checkpoint(step=step, cursor=cursor, buffer=state, seconds=self.seconds)
        await write_checkpoint(self._run.store, checkpoint)
