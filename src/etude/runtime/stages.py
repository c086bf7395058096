"""The stages of a run in turn, each on the same run directory; what is done is not done again."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Literal

import msgspec

from etude.config import RunConfig
from etude.dashboard.report import write_report
from etude.environments.reaping import gone
from etude.errors import ObjectMissingError, RunError, TrainerLostError
from etude.evaluation.suite import report_key
from etude.runtime.controller import Controller
from etude.runtime.directory import EvalSummary, RunDirectory
from etude.runtime.fleet import Fleet, open_fleet, sandboxes, trainer_program
from etude.runtime.journal import open_journal
from etude.runtime.learning import pretrain, sft
from etude.runtime.leases import LeaseBook
from etude.runtime.measuring import measure
from etude.runtime.pulse import Pulse
from etude.runtime.recorder import Recorder
from etude.runtime.recovery import Found, Recovery, look_back
from etude.runtime.sealing import seal, sizes_and_digests
from etude.runtime.services import ledger_end
from etude.runtime.settings import Settings
from etude.runtime.supervisor import Supervisor
from etude.runtime.task_sets import TaskSets, task_sets
from etude.runtime.watch import telling_waits, watching
from etude.store.ledger_format import read_run_id
from etude.telemetry.console import Console
from etude.telemetry.events import EvalEnded, SandboxDestroyed, StageEnded, StageStarted
from etude.telemetry.sink import JsonlSink
from etude.telemetry.waits import waiting
from etude.training.client import TrainerClient
from etude.weights.reader import read_head

Stage = Literal["pretrain", "sft", "eval", "train"]
LEARNING: frozenset[Stage] = frozenset(("pretrain", "sft"))
"""Stages that learn from text, without rollouts."""


_BAR_CELLS = 30

_TRAINER_BACK_S = 900.0
"""Longer than a budget of restarts lasts: when the trainer is given up, that is what is said."""


class Drained(Exception):  # noqa: N818 not an error: the user asked for it
    """The run was ended in order before it was finished."""


class StageRunner:
    """Runs stages of one run; an async context manager that owns the processes they share."""

    def __init__(self, run: RunDirectory, settings: Settings, console: Console) -> None:
        self._run = run
        self._config = settings.config
        self._settings = settings
        self._console = console
        self._stack = AsyncExitStack()
        self._fleet: Fleet | None = None
        self._trainer: TrainerClient | None = None
        self._supervisor: Supervisor | None = None
        self._services = AsyncExitStack()
        """Ends before the ledger does: what it leaves is part of the seal."""
        self._found: Found | None = None
        self._recovery: Recovery | None = None
        self._tasks: TaskSets | None = None
        self._pulse = Pulse(run.store, note=console.note)

    async def __aenter__(self) -> "StageRunner":
        # The lock on the metrics comes first: a second process must not touch a run that goes on.
        self._sink = JsonlSink(await self._run.fetch_metrics())
        self._stack.callback(self._sink.close)
        try:
            # A ledger of a newer etude is told before anything is written.
            with suppress(ObjectMissingError):
                await read_run_id(self._run.store)
            await self._run.adopt(self._settings)
            await self._stack.enter_async_context(self._pulse)
            self._journal, log = await self._stack.enter_async_context(open_journal(self._run))
            self._found = await look_back(self._run.store, log, self._console.note)
            self._journal.begin(self._found.state)
            await self._bury_sandboxes()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._services.aclose()
            if kind is None or kind is Drained:
                await seal(self._run.store, self._journal)
        finally:
            in_order = kind is None or kind is Drained
            await (self._stack.aclose() if in_order else self._stack.__aexit__(kind, error, trace))

    async def _bury_sandboxes(self) -> None:
        """Remove, and record as gone, what controllers that died left behind."""
        for name in sorted(await asyncio.to_thread(gone, set(self._journal.state.sandboxes))):
            self._journal.record(SandboxDestroyed(sandbox=name, reason="owner_died"))
        await self._journal.flush()

    async def run(self, stages: tuple[Stage, ...]) -> None:
        """Run these stages in turn; an evaluation counts as `before` training or `after` by its place.

        Raises `Drained` when the user ended the run in order.
        """
        await self._check(stages)
        for place, stage in enumerate(stages):
            when = "after" if "train" in stages[:place] else "before"
            await self._run_one(stage, when)
        await self._show_pass_rates()
        await write_report(self._run.store)

    async def evaluate_now(self) -> None:
        """Evaluate the newest version, whatever was evaluated before."""
        await self._check(("eval",))
        self._pulse.stage = "eval"
        await self._evaluate(None)
        await self._run.keep_metrics()
        await write_report(self._run.store)

    async def _show_pass_rates(self) -> None:
        """Print the pass rates that were measured as bars."""
        summary = await self._run.summary(seed=self._config.run.seed)
        for when, measured in summary.eval.items():
            if measured.pass_rate is not None:
                filled = round(measured.pass_rate * _BAR_CELLS)
                bar = "█" * filled + "░" * (_BAR_CELLS - filled)
                self._console.note(f"{when:<7} {bar} {measured.pass_rate:6.1%} of held-out attempts pass")

    async def _check(self, stages: tuple[Stage, ...]) -> None:
        """Find out what would end a later stage before an earlier one has taken its time."""
        if self._config.policy.path or not LEARNING.intersection(stages):
            await self._run.starting_policy(self._config)
        if not LEARNING.issuperset(stages):
            await self._task_sets()
            async with sandboxes(self._config):
                pass

    async def _run_one(self, stage: Stage, when: str) -> None:
        if await self._is_done(stage, when):
            self._console.note(f"{stage} is done")
            return
        name = f"eval_{when}" if stage == "eval" else stage
        self._pulse.stage = name
        self._journal.record(StageStarted(stage=name))
        started = perf_counter()
        if stage in LEARNING:
            with self._pulse.resting(), _interruptible():
                await self._learn(stage)
            seconds = perf_counter() - started
        elif stage == "eval":
            await self._evaluate(when)
            seconds = perf_counter() - started
        else:
            seconds = await self._train()
        await self._note_done(name, seconds, await self._left_by(stage))

    async def _is_done(self, stage: Stage, when: str) -> bool:
        """Whether there is nothing left to do; a run whose `trainer.steps` were raised goes on."""
        summary = await self._run.summary(seed=self._config.run.seed)
        if stage == "train":
            head = await read_head(self._run.store)
            return stage in summary.stages and head is not None and head.version >= self._config.trainer.steps
        if stage == "eval" and when == "after" and when in summary.eval:
            head = await read_head(self._run.store)
            return head is not None and summary.eval[when].version == head.version
        return when in summary.eval if stage == "eval" else stage in summary.stages

    async def _learn(self, stage: Stage) -> None:
        work = pretrain if stage == "pretrain" else sft
        await work(self._run, self._config, self._sink, self._console)

    async def _left_by(self, stage: Stage) -> dict[str, str]:
        """Return the digests of a stage's files by key."""
        store = self._run.store
        head = await read_head(store) if stage == "eval" else None
        keys = await store.list(f"policy/{stage}") if stage in LEARNING else []
        keys += [report_key(head.version)] if head is not None else []
        return {key: digest for key, (_, digest) in (await sizes_and_digests(store, keys)).items()}

    async def _note_done(self, name: str, seconds: float, files: dict[str, str]) -> None:
        self._journal.record(StageEnded(stage=name, seconds=round(seconds, 2), files=files))
        await self._journal.flush()
        summary = await self._run.summary(seed=self._config.run.seed)
        stages = {**summary.stages, name: round(seconds, 2)}
        await self._run.write_summary(
            msgspec.structs.replace(summary, stages=stages, seconds=round(sum(stages.values()), 2))
        )
        await self._run.keep_metrics()
        self._console.note(f"{name} took {seconds:.1f} s")

    async def _evaluate(self, when: str | None) -> None:
        fleet, _ = await self._open()
        tasks = await self._task_sets()
        async with self._watching(fleet):
            report = await measure(self._run, self._config, fleet, tasks.heldout, self._console)
        summary = await self._run.summary(seed=self._config.run.seed)
        measured = EvalSummary(
            pass_rate=report.pass_rate,
            attempts=report.attempts,
            tasks=report.tasks,
            interval=report.interval,
            version=report.version,
        )
        when = when or ("before" if report.version == 0 else "after")
        self._journal.record(
            EvalEnded(
                when=when,
                version=report.version,
                lineage=self._journal.state.lineage,
                attempts=report.attempts,
                tasks=report.tasks,
                pass_rate=report.pass_rate,
            )
        )
        await self._journal.flush()
        await self._run.write_summary(msgspec.structs.replace(summary, eval={**summary.eval, when: measured}))
        self._sink.record(
            {
                "stage": "eval",
                "step": report.version,
                "version": report.version,
                "eval/pass_rate": report.pass_rate,
                "eval/reward_mean": report.mean_reward,
            }
        )

    async def _train(self) -> float:
        """Train, and return the seconds that the stage took in all."""
        fleet, trainer = await self._open()
        assert self._found is not None
        assert self._recovery is not None
        controller = Controller(
            run=self._run,
            config=self._config,
            fleet=fleet,
            trainer=trainer,
            reconnect=self._reconnect,
            journal=self._journal,
            found=self._found,
            recovery=self._recovery,
            tasks=(await self._task_sets()).train,
            sink=self._sink,
            console=self._console,
            lag=self._pulse.worst_lag,
        )
        with _on_interrupt(controller.drain, self._console):
            async with self._watching(fleet):
                finished = await controller.train()
        if not finished:
            raise Drained
        return controller.seconds

    def _watching(self, fleet: Fleet) -> AbstractAsyncContextManager[None]:
        assert self._supervisor is not None
        return watching([self._supervisor, fleet.recorder, fleet.roster, fleet.canaries])

    async def _open(self) -> tuple[Fleet, TrainerClient]:
        """Start the processes that rollouts need, once for all stages."""
        if self._fleet is None or self._trainer is None:
            self._console.note("starting the trainer, the samplers and the sandboxes")
            enter, note = self._services.enter_async_context, self._console.note
            section = self._config.supervision
            leases = await enter(LeaseBook(self._run.store, lease_s=section.lease_s, note=note))
            read_end = partial(ledger_end, self._run.store, local=self._run.local)
            supervisor = Supervisor(section, leases, ledger=self._journal, read_end=read_end, note=note)
            self._supervisor = await enter(supervisor)
            recorder = await enter(Recorder(self._run.store, self._journal))
            async with telling_waits(note), watching([self._supervisor]):
                self._supervisor.start(trainer_program(self._run, self._config))
                fleet = open_fleet(
                    self._run,
                    self._config,
                    self._supervisor,
                    recorder,
                    publish=self._bring_up_trainer,
                    trainer=self._present_trainer,
                    note=note,
                )
                self._fleet = await enter(fleet)
        assert self._trainer is not None
        return self._fleet, self._trainer

    async def _bring_up_trainer(self) -> None:
        """Return when the trainer stands where the run does, and its version is published."""
        store, note = self._run.store, self._console.note
        groups_per_step = self._config.rollout.groups_per_step
        self._recovery = Recovery(store, self._journal, groups_per_step=groups_per_step, note=note)
        while True:
            trainer = await self._reconnect()
            try:
                return await self._recovery.bring_back(trainer)
            except TrainerLostError as error:
                note(f"{error}; waiting for the trainer to be started again")

    def _present_trainer(self) -> TrainerClient:
        """Return the way to the trainer; raise `RunError` before it has come up for the first time."""
        if self._trainer is None:
            raise RunError("the trainer is not up yet")
        return self._trainer

    async def _reconnect(self) -> TrainerClient:
        """Return a way to the trainer's next life, once it answers; raise `RunError` when that takes too long."""
        assert self._supervisor is not None
        async with waiting("the trainer", owner="controller", on="supervisor", deadline_s=_TRAINER_BACK_S):
            while True:
                url = await self._supervisor.up("trainer", owner="controller", deadline_s=_TRAINER_BACK_S)
                client = await self._services.enter_async_context(TrainerClient(url))
                try:
                    await client.health()
                except RunError:
                    # It is gone, and the supervisor does not know yet.
                    await asyncio.sleep(self._config.supervision.heartbeat_s)
                else:
                    self._trainer = client
                    return client

    async def _task_sets(self) -> TaskSets:
        if self._tasks is None:
            self._tasks = await asyncio.to_thread(task_sets, self._config, self._run.local)
        return self._tasks


@contextmanager
def _on_interrupt(drain: Callable[[], None], console: Console) -> Generator[None]:
    """Let the first Ctrl-C drain, and the second one interrupt."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        console.note("finishing the step under way, then saving; press Ctrl-C again to stop at once")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        drain()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def _interruptible() -> Generator[None]:
    """Let Ctrl-C end a block that never awaits: the event loop would keep it until the block's end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@asynccontextmanager
async def open_stages(settings: Settings, console: Console) -> AsyncGenerator[StageRunner]:
    """Open the run directory that the settings name, and what its stages share."""
    async with StageRunner(RunDirectory.open(settings.config.run.url), settings, console) as runner:
        yield runner


def planned(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a recipe; a trained model needs no pretraining."""
    return tuple(stage for stage in config.stages if not (stage == "pretrain" and config.policy.path))
