# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""A trainer and a controller that died at the worst places, brought back from checkpoint, facts and files."""

import asyncio
import hashlib
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch

from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.config import CheckpointSection, SamplingSection
from etude.errors import RunError, StoreError
from etude.learning_config import AlgorithmSection, TrainerSection
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.runtime.checkpoints import (
    Checkpoint,
    delete_old_checkpoints,
    read_trainer_files,
    trainer_file_key,
    write_checkpoint,
)
from etude.runtime.journal import Journal
from etude.runtime.recovery import Recovery
from etude.runtime.run_state import RunState, fold
from etude.store.groups import encode_group
from etude.store.opening import open_store
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import (
    Admitted,
    CheckpointDeleted,
    GroupLost,
    GroupReady,
    GroupTaken,
    LineageOpened,
    Resumed,
    Trained,
    VersionMade,
)
from etude.training.checkpoint import POLICY_FILE
from etude.training.client import TrainerClient
from etude.training.records import PublishRequest, StepRequest
from etude.training.service import TrainerService
from etude.training.trainer import Trainer, TrainerPlan
from etude.types import VersionRun
from etude.weight_types import VersionName
from etude.weights.background import BackgroundPublisher
from etude.weights.line import Line
from etude.weights.publisher import open_publisher
from etude.weights.reader import load_head, read_head

SHAPE = PolicyShape(
    model_type="qwen3", vocab_size=64, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_hidden=32,
    qk_norm=True,
)  # fmt: skip
PER_STEP = 2
PUBLISHED, HELD_BACK = StepRequest(), StepRequest(publish=False)


def drawn_with(version, group):
    """The group as if all its tokens were drawn with one version."""

    def of(node):
        runs = (VersionRun(version, len(node.completion.token_ids)),)
        return msgspec.structs.replace(node, completion=msgspec.structs.replace(node.completion, versions=runs))

    trajectories = [
        msgspec.structs.replace(trajectory, nodes=tuple(map(of, trajectory.nodes))) for trajectory in group.trajectories
    ]
    return msgspec.structs.replace(group, trajectories=tuple(trajectories))


class Run:
    """A run directory, and the controller that works on it."""

    def __init__(self):
        self.store = open_store("memory://")
        self.facts = MemoryLedger()
        self.trainers = MemoryLedger()
        self.journal = Journal(self.facts, writer="controller-1")
        self.notes: list[str] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        """Of each version as it was made first."""

    @asynccontextmanager
    async def trainer(self, lr=1e-2):
        """One life of the trainer's process; it starts at the policy that RL starts from."""

        async def announce(published):
            self.trainers.record(published)

        async def put(step, files):
            for name, data in files.items():
                await self.store.put(trainer_file_key(step, name), data)

        plan = TrainerPlan(AlgorithmSection(), TrainerSection(lr=lr), SamplingSection(), group_size=4)
        publisher = BackgroundPublisher(line=Line(self.store, announce=announce))
        service = TrainerService(
            Trainer(random_policy(SHAPE, seed=0), plan),
            publisher=publisher,
            save_checkpoint=lambda step, files: asyncio.run(put(step, files)),
            load_checkpoint=lambda step: asyncio.run(read_trainer_files(self.store, step)),
            ledger=self.trainers,
        )
        await service.start()
        try:
            async with TrainerClient(f"http://127.0.0.1:{service.port}") as client:
                yield client
        finally:
            await service.stop()
            publisher.close()

    def crash(self):
        """The controller dies; the next one folds what it recorded."""
        state = fold(RunState(), self.facts.events)
        self.journal = Journal(self.facts, writer="controller-2", follows=True)
        self.journal.begin(state)
        return state

    def recovery(self):
        return Recovery(self.store, self.journal, groups_per_step=PER_STEP, note=self.notes.append)

    def admit(self):
        number = self.journal.state.next_number
        self.journal.record(Admitted(ticket=number, task=f"t{number}", version=self.journal.state.version))
        return number

    def key(self, ticket):
        return f"groups/0/{ticket}.parquet"

    async def finish(self, ticket, *, file=True, newest_version=0):
        """Finish a group, or die before its file is written."""
        group = drawn_with(newest_version, synthetic_group(GroupPlan(), ticket))
        data = encode_group(group, [0.0] * len(group.trajectories))
        self.journal.record(
            GroupReady(
                ticket=ticket, key=self.key(ticket), digest=hashlib.sha256(data).hexdigest(), rollouts=(), drawn=0
            )
        )
        if file:
            await self.store.put(self.key(ticket), data)
        return group

    async def take(self, client, **finished):
        """Play a group and add it to the step under way."""
        ticket = self.admit()
        group = await self.finish(ticket, **finished)
        self.journal.record(GroupTaken(ticket=ticket, version=self.journal.state.version))
        await client.forward_backward([group])
        return ticket

    def note_made(self, report):
        self.journal.record(VersionMade(lineage=self.journal.state.lineage, version=report.version, step=report.step))

    async def step(self, client, request=PUBLISHED):
        tickets = [await self.take(client) for _ in range(PER_STEP)]
        self.note_made(await client.optim_step(request))
        return tickets

    async def checkpoint(self, client, keep=2):
        files = await client.checkpoint()
        checkpoint = Checkpoint(
            step=self.journal.state.version,
            cursor=b"",
            state=self.journal.state,
            position=self.journal.position,
            seconds=0.0,
        )
        await write_checkpoint(self.store, self.journal, checkpoint, files)
        await delete_old_checkpoints(self.store, self.journal, CheckpointSection(keep=keep))

    def facts_of(self, kind):
        return [fact for fact in self.facts.events if isinstance(fact, kind)]


@asynccontextmanager
async def running(run, lr=1e-2):
    """A trainer that was brought to where the run stands."""
    async with run.trainer(lr) as client:
        recovery = run.recovery()
        await recovery.bring_back(client)
        client.recovery = recovery
        yield client


async def head_weights(run):
    head = await read_head(run.store)
    loaded = await load_head(run.store, head)
    name = VersionName(lineage=head.lineage, version=head.version, digest=head.digest)
    return name, {name: bytes(flat.data) for name, flat in loaded.tensors.items()}


async def started(run, steps, checkpoints=()):
    """Train some steps; every version is published when this returns. The bytes of the last one are returned."""
    async with running(run) as client:
        for step in range(1, steps + 1):
            await run.step(client)
            if step in checkpoints:
                await run.checkpoint(client)
    return await head_weights(run)


@pytest.mark.parametrize("checkpoints", [(), (1,), (2,), (1, 2, 3)])
async def test_a_trainer_that_comes_back_has_the_same_bytes_and_changes_nothing_for_anybody(checkpoints):
    run = Run()
    before = await started(run, 3, checkpoints)
    run.crash()
    async with running(run) as client:
        assert (await client.health()).version == 3
        assert await head_weights(run) == before
        assert (await client.compare()).is_head
    assert len(run.facts_of(LineageOpened)) == 1
    newest = max(checkpoints, default=0)
    [resumed] = run.facts_of(Resumed)
    assert (resumed.step, resumed.replayed) == (newest, 3 - newest)
    replayed = [trained.version for trained in run.trainers.events if isinstance(trained, Trained) and trained.replayed]
    assert replayed == list(range(newest + 1, 4))


@pytest.mark.parametrize("request_", [HELD_BACK, PUBLISHED], ids=["not published", "published"])
async def test_a_step_that_nobody_recorded_is_made_of_the_same_groups(request_):
    run = Run()
    async with running(run) as client:
        await run.step(client)
        await run.checkpoint(client)
        tickets = [await run.take(client) for _ in range(PER_STEP)]
        await client.optim_step(request_)
    before = await head_weights(run)
    state = run.crash()
    assert [ticket.number for ticket in state.taken] == tickets
    async with running(run) as client:
        assert run.journal.state.version == 2
        report = client.recovery.completed()
        assert report.version == 2
        assert client.recovery.completed() is None
        after = await head_weights(run)
    assert after[0].version == 2
    if request_.publish:
        assert after == before
    assert len(run.facts_of(LineageOpened)) == 1
    assert [made.version for made in run.facts_of(VersionMade)] == [1, 2]


async def test_groups_of_a_step_that_misses_some_are_taken_again_and_the_step_is_not_made():
    run = Run()
    async with running(run) as client:
        await run.step(client)
        ticket = await run.take(client)
    run.crash()
    async with running(run) as client:
        assert client.recovery.completed() is None
        assert (await client.health()).pending_groups == 0
    state = run.journal.state
    assert (state.version, [taken.number for taken in state.taken]) == (1, [ticket])


async def test_a_version_that_was_recorded_and_not_published_is_published():
    run = Run()
    async with running(run) as client:
        await run.step(client)
        await run.step(client, HELD_BACK)
    before, _ = await head_weights(run)
    assert before.version == 1
    run.crash()
    async with running(run):
        pass
    after, _ = await head_weights(run)
    assert (after.lineage, after.version) == (before.lineage, 2)


async def test_a_trainer_whose_run_another_one_took_over_makes_no_more_steps():
    run = Run()
    async with running(run) as client:
        await run.step(client)
        await open_publisher(run.store, lineage=(await read_head(run.store)).lineage)
        before, _ = await head_weights(run)
        with pytest.raises(RunError, match="another trainer was started for this run"):  # noqa: PT012
            for _ in range(3):
                await run.step(client)
    assert (await head_weights(run))[0] == before


async def test_other_bytes_open_a_lineage_at_the_same_version():
    run = Run()
    before, _ = await started(run, 2)
    run.crash()
    async with running(run, lr=1e-3):
        pass
    after, _ = await head_weights(run)
    assert after.version == before.version == 2
    assert after.lineage != before.lineage
    opened = run.facts_of(LineageOpened)[-1]
    assert (opened.lineage, opened.version, opened.parent) == (after.lineage, 2, before.lineage)
    assert "other bytes" in opened.reason


async def test_other_bytes_are_noticed_although_the_newest_version_was_not_published():
    run = Run()
    async with running(run) as client:
        await run.step(client)
        await run.step(client, HELD_BACK)
    before, _ = await head_weights(run)
    run.crash()
    async with running(run, lr=1e-3):
        pass
    after, _ = await head_weights(run)
    assert (before.version, after.version) == (1, 2)
    assert after.lineage != before.lineage
    assert run.facts_of(LineageOpened)[-1].version == 2


async def test_a_lineage_that_nobody_recorded_is_recorded_by_the_next_controller():
    run = Run()
    await started(run, 1)
    run.crash()
    async with run.trainer() as client:
        recovery = Recovery(run.store, run.journal, groups_per_step=PER_STEP, note=run.notes.append)
        await recovery.bring_back(client)
        await client.publish(PublishRequest(fork="a crash comes before this is recorded"))
    run.crash()
    async with running(run):
        pass
    head, _ = await head_weights(run)
    assert run.journal.state.lineage == head.lineage
    assert run.facts_of(LineageOpened)[-1].lineage == head.lineage


async def test_steps_whose_groups_are_gone_are_given_up_and_the_other_groups_come_back():
    run = Run()
    before, _ = await started(run, 3, (1,))
    await run.store.delete(run.key(4))
    run.crash()
    async with running(run) as client:
        assert (await client.health()).version == 2
    after, _ = await head_weights(run)
    assert after.version == 2
    assert after.lineage != before.lineage
    [resumed] = run.facts_of(Resumed)
    assert (resumed.step, resumed.replayed, resumed.returned) == (1, 1, (4, 5))
    assert [(lost.ticket, lost.reason) for lost in run.facts_of(GroupLost)] == [(4, "file_missing")]
    state = run.journal.state
    assert [ticket.number for ticket in state.finished] == [5]
    assert state.version == 2
    assert any("given up" in note for note in run.notes)


async def test_what_belongs_to_versions_that_are_given_up_is_lost_with_them():
    run = Run()
    async with running(run) as client:
        for _ in range(3):
            await run.step(client)
        old = run.admit()
        await run.finish(old, newest_version=3)
        run.admit()
    await run.store.delete(run.key(2))
    run.crash()
    async with running(run) as client:
        await run.step(client)
    lost = {lost.ticket: lost.reason for lost in run.facts_of(GroupLost)}
    assert lost == {2: "file_missing"} | dict.fromkeys((4, 5, old, old + 1), "version_given_up")
    assert [ticket.number for ticket in run.journal.state.finished] == [3]
    head, _ = await head_weights(run)
    assert head.version == 2


async def test_a_crash_while_versions_are_given_up_loses_no_account():
    run = Run()
    async with running(run) as client:
        for _ in range(3):
            await run.step(client)
        old = run.admit()
        await run.finish(old, newest_version=3)
    await run.store.delete(run.key(2))
    run.crash()
    async with running(run):
        pass
    place = next(place for place, fact in enumerate(run.facts.events) if isinstance(fact, Resumed))
    del run.facts.events[place + 1 :]
    state = run.crash()
    assert [ticket.number for ticket in state.finished] == [2, 3, 4, 5, old]
    async with running(run):
        pass
    lost = {lost.ticket: lost.reason for lost in run.facts_of(GroupLost)}
    assert lost == dict.fromkeys((4, 5, old), "version_given_up")
    state = run.journal.state
    assert [ticket.number for ticket in state.in_flight] == [2]
    assert [ticket.number for ticket in state.finished] == [3]


async def test_an_unfinished_group_without_its_file_is_played_again():
    run = Run()
    async with running(run) as client:
        await run.step(client)
        playing, finished, gone = run.admit(), run.admit(), run.admit()
        await run.finish(finished)
        await run.finish(gone, file=False)
    run.crash()
    async with running(run):
        pass
    [resumed] = run.facts_of(Resumed)
    assert resumed.restarted == (playing, gone)
    state = run.journal.state
    assert [ticket.number for ticket in state.in_flight] == [playing, gone]
    assert [ticket.number for ticket in state.finished] == [finished]
    assert not run.facts_of(GroupLost)


async def test_a_damaged_checkpoint_costs_a_longer_replay():
    run = Run()
    before = await started(run, 3, (1, 2))
    key = trainer_file_key(2, POLICY_FILE)
    data = bytearray(await run.store.get(key))
    data[len(data) // 2] ^= 1
    await run.store.put(key, bytes(data))
    run.crash()
    async with running(run):
        assert await head_weights(run) == before
    [resumed] = run.facts_of(Resumed)
    assert (resumed.step, resumed.replayed) == (1, 2)
    assert [deleted.step for deleted in run.facts_of(CheckpointDeleted)] == [2]
    assert any("checkpoint 2 is damaged" in note for note in run.notes)


async def test_a_run_without_an_intact_checkpoint_says_so():
    run = Run()
    async with running(run) as client:
        for _ in range(3):
            await run.step(client)
            await run.checkpoint(client, keep=1)
    await run.store.delete(trainer_file_key(3, POLICY_FILE))
    run.crash()
    async with run.trainer() as client:
        with pytest.raises(StoreError, match="no checkpoint of the run is intact"):
            await run.recovery().bring_back(client)


async def test_a_group_that_disappears_while_the_run_goes_on_ends_it_with_what_to_do():
    run = Run()
    async with running(run) as client:
        await run.step(client)
    await run.store.delete(run.key(0))
    # The same controller: it has said already what it found.
    recovery = Recovery(
        run.store, Journal(run.facts, writer="controller-1"), groups_per_step=PER_STEP, note=run.notes.append
    )
    recovery._journal.begin(run.journal.state)
    async with run.trainer() as client:
        with pytest.raises(RunError, match="run the same command again"):
            await recovery.bring_back(client)


async def test_a_trainer_that_dies_again_and_again_ends_at_the_same_bytes():
    run = Run()
    before = await started(run, 2)
    for _ in range(3):
        run.crash()
        async with running(run):
            assert await head_weights(run) == before
    assert len(run.facts_of(VersionMade)) == 2
    assert msgspec.structs.replace(run.journal.state, files={}) == msgspec.structs.replace(run.crash(), files={})
