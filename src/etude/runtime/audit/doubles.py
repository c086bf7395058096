"""A small run directory made without a trainer, a sampler or a sandbox, complete with everything that is audited.

It went through a crash: its first controller was killed while a group was being played, the second one finished.
"""

import hashlib
import random
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import torch

from etude.algorithm.advantages import centred
from etude.algorithm.trees import edge_counts
from etude.config import RolloutSection, RunConfig, RunSection, TasksSection
from etude.rollout.identity import HarnessIdentity
from etude.rollout.record import RolloutRecord, encode_record
from etude.runtime.checkpoints import POINTER_KEY
from etude.runtime.directory import CONFIG_KEY, METRICS_KEY, SUMMARY_KEY, EvalSummary, Summary
from etude.runtime.settings import Settings, resolved_toml
from etude.store.groups import encode_group, group_key
from etude.store.ledger_format import SEAL_KEY, SealFile, open_run_id
from etude.store.ledger_segments import SegmentWriter
from etude.store.local import FileStore
from etude.tasks.source import SeededTaskSource
from etude.telemetry import digests
from etude.telemetry import events as facts
from etude.types import (
    Completion,
    Edge,
    FinishReason,
    Group,
    Node,
    Outcome,
    Support,
    Task,
    Trajectory,
    VersionRun,
)
from etude.weights.publisher import Publisher, open_publisher

CONFIG = RunConfig(
    run=RunSection(seed=3),
    tasks=TasksSection(family="pyfix", num_train=5, num_heldout=1),
    rollout=RolloutSection(group_size=2, groups_per_step=2, max_staleness=1),
)
LINEAGE = "0001-aaaaaaaa"
_HARNESS = HarnessIdentity(name="double")
OnMoment = Callable[[], Awaitable[None]]
TASKS = tuple(f"task-{number}" for number in range(5))


class Writer:
    """One process's ledger, written at once."""

    def __init__(self, root: Path, service: str, run_id: str, number: int, *, after: "Writer | None" = None) -> None:
        """Begin the ledger of a service's life with this number, which may follow another one."""
        self.service = service
        self.name = f"{service}-{number:08x}"
        self._segments = SegmentWriter(root, writer=self.name, run_id=run_id)
        self._encode = msgspec.json.Encoder().encode
        last = (after.name, after.events, after.chain) if after else ("", 0, "")
        self.record(facts.Opened(service=service, after=last[0], after_events=last[1], after_chain=last[2]))

    @property
    def events(self) -> int:
        """Facts so far."""
        return self._segments.events

    @property
    def chain(self) -> str:
        """Chain value after them."""
        return self._segments.chain

    def record(self, *told: facts.Event) -> None:
        """Write facts, as one batch."""
        self._segments.append([self._encode(fact) + b"\n" for fact in told])
        self._segments.write()

    def end(self) -> None:
        """End in order."""
        self.record(facts.Closed())
        self._segments.end()
        self._segments.release()

    def kill(self) -> None:
        """End as `kill -9` does."""
        self._segments.release()


class RunDouble:
    """Writes the run; `await write_run(directory)` does everything."""

    def __init__(self, store: FileStore, run_id: str, on_moment: OnMoment) -> None:
        self.store = store
        self._on_moment = on_moment
        self._run_id = run_id
        self._publisher: Publisher | None = None
        self._told: list[facts.Published] = []
        self._random = random.Random(7)
        self.torn_task = ""
        """Whose group was being played at the kill."""
        self.drawn: dict[int, int] = {}
        """Drawn tokens of finished groups, by ticket."""
        self.files: dict[str, str] = {}
        """sha256 of files that the seal claims."""

    def writer(self, service: str, number: int, *, after: Writer | None = None) -> Writer:
        """Begin a ledger."""
        return Writer(self.store.root, service, self._run_id, number, after=after)

    async def put(self, key: str, data: bytes, *, sealed: bool = True) -> str:
        """Write a file, and return its sha256."""
        await self._on_moment()
        await self.store.put(key, data)
        await self._on_moment()
        digest = hashlib.sha256(data).hexdigest()
        if sealed:
            self.files[key] = digest
        return digest

    async def publish(self, trainer: Writer, version: int) -> str:
        """Publish weights, and return their digest."""
        generator = torch.Generator().manual_seed(version)
        tensors = {name: torch.randn(40, 8, generator=generator) for name in ("a.weight", "b.weight")}
        if self._publisher is None:
            self._publisher = await open_publisher(self.store, lineage=LINEAGE, announce=self._hear)
        manifest = await self._publisher.publish(version=version, step=version, tensors=tensors)
        trainer.record(*(told for told in self._told if told.version == version))
        return manifest.digest

    async def _hear(self, published: facts.Published) -> None:
        self._told.append(published)

    def draw(self, sampler: Writer, request: str, prompt: tuple[int, ...], version: int) -> Completion:
        """Draw a completion, as a sampler that holds this version records it."""
        count = self._random.randint(2, 6)
        ids = tuple(self._random.randrange(50) for _ in range(count))
        support = Support(
            counts=struct.pack(f"<{count}H", *[1] * count),
            token_ids=struct.pack(f"<{count}I", *ids),
            logprobs=bytes(4 * count),
        )
        completion = Completion(
            token_ids=ids,
            sampler_logprobs=bytes(4 * count),
            versions=(VersionRun(version, count),),
            finish_reason=FinishReason.STOP,
            pool="local",
            lineage=LINEAGE,
            support=support,
        )
        sampler.record(
            facts.Drawn(
                request=request,
                prompt=len(prompt),
                prompt_digest=digests.of_ids(prompt),
                tokens=count,
                digest=digests.of_drawn(completion),
                versions=((version, count),),
                lineage=LINEAGE,
            )
        )
        return completion

    async def play(
        self, controller: Writer, sampler: Writer, place: tuple[str, int, str], version: int, *, life: int = 0
    ) -> Trajectory:
        """Play one rollout of two calls: `place` is group, index and task."""
        group_id, index, task = place
        purpose = "train" if group_id.startswith("g") else "eval"
        rollout, session = f"{group_id}-{index}", f"{group_id}-{index}-{life:08x}"
        controller.record(facts.RolloutStarted(rollout=rollout, session=session, task=task, purpose=purpose))
        controller.record(facts.SandboxCreated(sandbox=f"box-{session}"))
        nodes: list[Node] = []
        told: tuple[int, ...] = ()
        for number, added in enumerate(((1, 2, 3), (4, 5))):
            completion = self.draw(sampler, f"{session}/{number}", (*told, *added), version)
            told = (*told, *added, *completion.token_ids)
            parent, edge = (number - 1, Edge.CONTINUATION) if number else (None, Edge.ROOT)
            nodes.append(Node(node_id=number, parent=parent, edge=edge, prompt_ids=added, completion=completion))
        trajectory = Trajectory(
            rollout_id=rollout,
            session_id=session,
            group_id=group_id,
            task_id=task,
            index=index,
            outcome=Outcome.SCORED,
            reward=float(self._random.randint(0, 1)),
            nodes=tuple(nodes),
        )
        controller.record(facts.SandboxDestroyed(sandbox=f"box-{session}"))
        record = RolloutRecord(trajectory=trajectory, purpose=purpose, instruction="Do it.", harness=_HARNESS)
        data = encode_record(record)
        controller.record(
            facts.RolloutEnded(
                rollout=rollout,
                session=session,
                outcome=trajectory.outcome.value,
                reward=trajectory.reward,
                calls=len(nodes),
                edges=edge_counts(nodes),
                drawn=_drawn(trajectory),
                digest=hashlib.sha256(data).hexdigest(),
            )
        )
        await self.put(record.key, data, sealed=False)
        return trajectory

    async def finish(self, controller: Writer, ticket: tuple[int, str, int], played: list[Trajectory]) -> None:
        """Keep the group that was played for a ticket: number, task, version."""
        number, task, version = ticket
        group_id = f"g{number:06d}"
        group = Group(
            group_id=group_id, task_id=task, ticket=number, admitted_version=version, trajectories=tuple(played)
        )
        rewards = [one.reward for one in played if one.reward is not None]
        data = encode_group(group, centred(rewards, group_size=CONFIG.rollout.group_size))
        self.drawn[number] = sum(map(_drawn, played))
        key = group_key(version, group_id)
        controller.record(
            facts.GroupReady(
                ticket=number,
                key=key,
                digest=hashlib.sha256(data).hexdigest(),
                rollouts=tuple(one.session_id for one in played),
                drawn=self.drawn[number],
            )
        )
        await self.put(key, data, sealed=False)


def _drawn(trajectory: Trajectory) -> int:
    return sum(len(node.completion.token_ids) for node in trajectory.nodes)


async def _pass_by() -> None:
    pass


async def write_run(directory: Path, *, on_moment: OnMoment = _pass_by) -> FileStore:
    """Write the run into an empty directory, sealed, and return its store.

    `on_moment` is awaited before and after each file is written, for whoever wants to look at a run that goes on.
    """
    store = FileStore(directory)
    run = RunDouble(store, await open_run_id(store), on_moment)
    await run.put(CONFIG_KEY, resolved_toml(Settings(config=CONFIG, provenance={})).encode())
    for name in TASKS:
        await run.put(f"tasks/train/{name}/instruction.md", f"Do {name}.\n".encode())
    tasks = [Task(task_id=name, path="", digest="", instruction="") for name in TASKS]
    source = SeededTaskSource(tasks, seed=CONFIG.run.seed)
    killed = await _first_life(run, source)
    controller, lives = await _second_life(run, source, killed)
    await _evaluate(run, controller, lives[1])
    await _seal(run, controller, lives)
    return store


async def _first_life(run: RunDouble, source: SeededTaskSource) -> list[Writer]:
    """Go on until a kill, while the group of ticket 3 is played; return controller, trainer and sampler."""
    controller = run.writer("controller", 1)
    policy = await run.put("policy/sft/config.json", b"{}", sealed=False)
    controller.record(facts.StageStarted(stage="sft"))
    controller.record(facts.StageEnded(stage="sft", seconds=1.5, files={"policy/sft/config.json": policy}))
    lives = [run.writer("trainer", 2), run.writer("local-0", 3)]
    controller.record(*map(_started, lives))
    await _publish(run, lives, 0)
    controller.record(facts.LineageOpened(lineage=LINEAGE, version=0, reason="the first"))
    for ticket in range(2):
        await _group(run, controller, lives[1], (ticket, source.next_task().task_id, 0))
    await _step(run, controller, lives, 1)
    await _group(run, controller, lives[1], (2, source.next_task().task_id, 1))
    run.torn_task = source.next_task().task_id
    controller.record(facts.Admitted(ticket=3, task=run.torn_task, version=1))
    await run.play(controller, lives[1], ("g000003", 0, run.torn_task), 1)
    for life in (controller, *lives):
        life.kill()
    return [controller, *lives]


async def _second_life(run: RunDouble, source: SeededTaskSource, killed: list[Writer]) -> tuple[Writer, list[Writer]]:
    """Play the torn group again, lose one, and train; return the controller, and trainer and sampler."""
    controller = run.writer("controller", 4, after=killed[0])
    controller.record(*map(_ended, killed[1:]), facts.Resumed(step=1, restarted=(3,)))
    lives = [run.writer("trainer", 5, after=killed[1]), run.writer("local-0", 6, after=killed[2])]
    controller.record(*map(_started, lives))
    await _publish(run, lives, 1)
    task = run.torn_task
    played = [await run.play(controller, lives[1], ("g000003", index, task), 1, life=1) for index in range(2)]
    await run.finish(controller, (3, task, 1), played)
    controller.record(facts.Admitted(ticket=4, task=source.next_task().task_id, version=1))
    controller.record(facts.GroupLost(ticket=4, reason="too_few_survivors"))
    await _step(run, controller, lives, 2)
    return controller, lives


def _started(life: Writer) -> facts.ServiceStarted:
    return facts.ServiceStarted(service=life.service, writer=life.name, pid=7)


def _ended(life: Writer) -> facts.ServiceEnded:
    return facts.ServiceEnded(service=life.service, writer=life.name, reason="", events=life.events, chain=life.chain)


async def _publish(run: RunDouble, lives: list[Writer], version: int) -> None:
    digest = await run.publish(lives[0], version)
    lives[1].record(facts.Applied(lineage=LINEAGE, version=version, digest=digest, held=f"h{version}", view="fp32"))


async def _group(run: RunDouble, controller: Writer, sampler: Writer, ticket: tuple[int, str, int]) -> None:
    """Admit a ticket (number, task, version), and play its group."""
    number, task, version = ticket
    controller.record(facts.Admitted(ticket=number, task=task, version=version))
    played = [await run.play(controller, sampler, (f"g{number:06d}", index, task), version) for index in range(2)]
    await run.finish(controller, ticket, played)


async def _step(run: RunDouble, controller: Writer, lives: list[Writer], version: int) -> None:
    """Train on two groups and publish the version that they make."""
    tickets = (2 * version - 2, 2 * version - 1)
    controller.record(*(facts.GroupTaken(ticket=ticket, version=version - 1) for ticket in tickets))
    groups = tuple(
        facts.TrainedGroup(
            group=f"g{ticket:06d}",
            drawn=run.drawn[ticket],
            trained=run.drawn[ticket] - 1,
            masked={"support_unknown": 1},
        )
        for ticket in tickets
    )
    lives[0].record(facts.Trained(lineage=LINEAGE, version=version, step=version, groups=groups))
    controller.record(facts.VersionMade(lineage=LINEAGE, version=version, step=version))
    await _publish(run, lives, version)
    key = f"checkpoints/{version:06d}/trainer.json"
    files = {key: await run.put(key, b'{"step":%d}' % version, sealed=False)}
    controller.record(facts.CheckpointWritten(step=version, version=version, lineage=LINEAGE, files=files))
    await run.put(POINTER_KEY, b'{"step":%d}' % version)


async def _evaluate(run: RunDouble, controller: Writer, sampler: Writer) -> None:
    controller.record(facts.StageEnded(stage="train", seconds=9.0))
    played = [await run.play(controller, sampler, ("eval-v2-task-9", index, "task-9"), 2) for index in range(2)]
    rate = sum(one.reward or 0.0 for one in played) / 2
    measured = EvalSummary(pass_rate=rate, attempts=2, tasks=1, interval=(0.0, 1.0), version=2)
    await run.put("evals/2/report.json", msgspec.json.encode(measured))
    controller.record(
        facts.EvalEnded(when="after", version=2, lineage=LINEAGE, attempts=2, tasks=1, pass_rate=rate),
        facts.StageEnded(stage="eval_after", seconds=2.0),
    )
    stages = {"sft": 1.5, "train": 9.0, "eval_after": 2.0}
    summary = Summary(seed=CONFIG.run.seed, seconds=12.5, stages=stages, eval={"after": measured})
    await run.put(SUMMARY_KEY, msgspec.json.encode(summary))


async def _seal(run: RunDouble, controller: Writer, lives: list[Writer]) -> None:
    await run.put(METRICS_KEY, b'{"step":1}\n{"step":2}\n')
    await run.put("report.html", b"<p>done</p>")
    await run.put("logs/trainer.log", b"nothing to say\n", sealed=False)
    await run.put("weights/head", await run.store.get("weights/head"))
    for life in lives:
        life.end()
        controller.record(_ended(life))
    sizes = {key: (len(await run.store.get(key)), digest) for key, digest in run.files.items()}
    writers = {life.name: (life.events, life.chain) for life in lives}
    controller.record(facts.Sealed(files=sizes, writers=writers))
    place = SealFile(writer=controller.name, events=controller.events, chain=controller.chain)
    await run.put(SEAL_KEY, msgspec.json.encode(place), sealed=False)
    controller.end()
