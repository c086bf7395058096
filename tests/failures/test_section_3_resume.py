# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Runs that were killed. One run is killed again and again, and every test asks what became of its prompts."""

import shutil
from collections import Counter

import pytest
import torch
from failure_kit import task
from s3_kit import ENVIRONMENT

from etude.config import CheckpointSection
from etude.errors import StoreError
from etude.rollout.buffer import SlotBuffer
from etude.runtime.checkpoints import Checkpoint, delete_old_checkpoints, write_checkpoint
from etude.runtime.directory import RunDirectory
from etude.runtime.journal import Journal, open_journal
from etude.runtime.recovery import look_back
from etude.store.faulty import Faults, FaultyStore
from etude.store.local import FileStore
from etude.tasks.source import SeededTaskSource
from etude.telemetry.clock import ManualClock
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import (
    Admitted,
    CheckpointWritten,
    GroupReady,
    GroupTaken,
    Resumed,
    RolloutStarted,
    VersionMade,
)
from etude.training.records import StoredFile
from etude.types import Group
from etude.weights.publisher import open_publisher
from etude.weights.reader import load_head, read_head

TASKS = [task(f"t{number:02d}") for number in range(24)]
LONG = {"t03", "t11", "t17"}
"""Tasks that are still being played whenever the others are finished."""


class Life:
    """What one life of a controller does, in miniature; it ends without a word."""

    def __init__(self, source, buffer):
        self.source, self.buffer = source, buffer

    def admit(self, count):
        for _ in range(count):
            self.buffer.admit(self.source.next_task().task_id)

    def finish(self):
        for ticket in self.buffer.in_flight:
            if ticket.task_id not in LONG:
                self.buffer.finish(ticket, group_of(ticket))

    def train(self):
        groups = [self.buffer.try_take(self.buffer.version) for _ in range(self.buffer.groups_per_step)]
        made = self.buffer.version + 1
        self.buffer.trained(made)
        self.buffer.served(made)
        return [group.task_id for group in groups]


def group_of(ticket):
    return Group(
        group_id=ticket.group_id,
        task_id=ticket.task_id,
        ticket=ticket.number,
        admitted_version=ticket.admitted_version,
        trajectories=(),
    )


def trained_with_a_cursor_alone(lives):
    """The mistake: a checkpoint keeps the place in the data, and what was admitted by then counts as done."""
    trained, cursor = [], None
    for _ in range(lives):
        source = SeededTaskSource(TASKS, seed=0)
        if cursor is not None:
            source.restore(cursor)
        life = Life(source, SlotBuffer(groups_per_step=2, max_staleness=3))
        life.admit(8)
        life.finish()
        trained += life.train()
        cursor = source.cursor()
    return trained


@pytest.mark.slow
@pytest.mark.row("P-31")
def test_every_admitted_prompt_is_trained_once_or_reported_lost(disturbed):
    """Over any number of kills the prompts admitted are those of the data, in order; each is trained exactly once."""
    lossy = trained_with_a_cursor_alone(lives=3)
    assert not LONG & set(lossy)
    assert len(lossy) < len(TASKS)

    admitted = disturbed.of(Admitted)
    assert len(list(disturbed.after_resumes())) >= disturbed.kills - 1
    assert [fact.ticket for fact in admitted] == list(range(len(admitted)))
    assert [fact.task for fact in admitted] == disturbed.order
    state = disturbed.state
    taken = Counter(fact.ticket for fact in disturbed.of(GroupTaken))
    for fact in disturbed.of(Resumed):
        taken.subtract(fact.returned)
    assert max(taken.values()) == 1
    left = {ticket.number for ticket in (*state.in_flight, *state.finished)}
    trained = {number for number, times in taken.items() if times}
    assert state.lost == {}
    assert trained | left == set(range(len(admitted)))
    assert not trained & left
    assert len(trained) == 2 * disturbed.steps == state.num_trained


@pytest.mark.slow
@pytest.mark.row("P-32")
def test_groups_that_were_finished_are_used_and_not_played_again(disturbed):
    """A finished group is a file that the ledger names: a resumed run trains on it, whatever was buffered when."""
    life = Life(SeededTaskSource(TASKS, seed=0), SlotBuffer(groups_per_step=2, max_staleness=3))
    life.admit(8)
    life.finish()
    assert life.buffer.num_ready > 2
    # The mistake: a checkpoint of the trainer alone.
    forgetful = SlotBuffer(groups_per_step=2, max_staleness=3, version=life.buffer.version)
    assert forgetful.num_ready == 0
    # Oversampling: more groups are ready than a step takes, and all of them come back.
    kept = {ticket.group_id: group_of(ticket) for ticket in life.buffer.state().finished}
    again = SlotBuffer.restore(life.buffer.state(), kept, groups_per_step=2, max_staleness=3)
    assert (again.num_ready, again.in_flight) == (life.buffer.num_ready, life.buffer.in_flight)

    used = 0
    for before, after in disturbed.after_resumes():
        made = max((place for place, fact in enumerate(before) if isinstance(fact, VersionMade)), default=0)
        trained = {fact.ticket for fact in before[:made] if isinstance(fact, GroupTaken)}
        ready = {fact.ticket for fact in before if isinstance(fact, GroupReady)} - trained
        # The fact comes before the file: a kill between the two leaves a group that is played again, and said to be.
        ready -= set(after[0].restarted)
        played = {
            int(fact.rollout[1:7]) for fact in after if isinstance(fact, RolloutStarted) and fact.purpose == "train"
        }
        assert not ready & played
        used += len(ready)
    assert used > 0


@pytest.mark.slow
@pytest.mark.row("P-34")
def test_a_resumed_run_goes_on_with_the_next_prompt(disturbed):
    """The first prompt after a resume is the one after the last admitted, not the first of the data."""
    fresh = SeededTaskSource(TASKS, seed=0)
    first = fresh.next_task().task_id
    # The mistake: a data actor that nobody restores.
    assert SeededTaskSource(TASKS, seed=0).next_task().task_id == first
    continued = SeededTaskSource(TASKS, seed=0)
    continued.restore(fresh.cursor())
    assert continued.next_task().task_id == fresh.next_task().task_id != first

    seen = 0
    for before, after in disturbed.after_resumes():
        known = sum(isinstance(fact, Admitted) for fact in before)
        admitted = [fact for fact in after if isinstance(fact, Admitted)]
        if admitted:
            seen += 1
            assert (admitted[0].ticket, admitted[0].task) == (known, disturbed.order[known])
    assert seen > 0


@pytest.mark.slow
@pytest.mark.row("P-37")
def test_only_the_newest_checkpoints_are_kept(disturbed):
    """`checkpoint.keep` bounds what checkpoints take: older ones are deleted as newer ones appear."""
    written = {fact.step: fact.num_bytes for fact in disturbed.of(CheckpointWritten)}
    folders = [path for path in (disturbed.directory / "checkpoints").iterdir() if path.is_dir()]
    taken = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    # The mistake: a checkpoint now and then, and none deleted.
    assert len(written) > disturbed.keep
    assert taken < sum(written.values())

    assert sorted(folder.name for folder in folders if any(folder.iterdir())) == [
        f"{step:06d}" for step in sorted(written)[-disturbed.keep :]
    ]


@pytest.mark.slow
@pytest.mark.row("P-39")
def test_a_run_that_was_killed_is_resumed_and_a_finished_one_takes_no_step(disturbed):
    """The same command goes on where a killed run was, to its last step; on a finished run it takes none."""
    versions = [fact.version for fact in disturbed.of(VersionMade)]
    # The mistake: a run that is started again makes its first version again.
    assert Counter(versions)[1] == 1
    assert sorted(set(versions)) == list(range(1, disturbed.steps + 1))
    assert disturbed.again.steps == []


class Kept:
    """Numbers and names of a checkpoint, for tests that need one without a trainer."""

    def __init__(self, step):
        self.step = step
        self.files = {name: StoredFile(num_bytes=100, digest="") for name in ("policy", "optimizer", "state")}

    async def write(self, store, journal):
        for name in self.files:
            await store.put(f"checkpoints/{self.step:06d}/{name}", bytes(100))
        checkpoint = Checkpoint(
            step=self.step, cursor=b"c", state=journal.state, position=journal.position, seconds=float(self.step)
        )
        await write_checkpoint(store, journal, checkpoint, self.files)


class Stubborn(FaultyStore):
    """A file system that gives nothing back: what is open somewhere cannot be deleted."""

    async def delete(self, key):
        raise StoreError(f"object {key!r}: device or resource busy; close it first")


@pytest.mark.row("P-36")
async def test_a_clean_up_that_fails_is_a_warning(tmp_path):
    """An old checkpoint that cannot be deleted is reported and tried again later; the run goes on."""
    healthy = FileStore(tmp_path)
    stubborn = Stubborn(healthy, clock=ManualClock(), faults=Faults())
    with pytest.raises(StoreError):
        await stubborn.delete("checkpoints/000001/policy")

    journal = Journal(MemoryLedger(), writer="controller-1")
    for step in (1, 2, 3):
        await Kept(step).write(healthy, journal)
    section = CheckpointSection(keep=1)
    warnings = await delete_old_checkpoints(stubborn, journal, section)
    assert len(warnings) == 8
    assert all("was not deleted" in warning and "busy" in warning for warning in warnings)
    assert [kept.step for kept in journal.state.checkpoints] == [3]
    assert await delete_old_checkpoints(healthy, journal, section) == []
    assert {key.split("/")[1] for key in await healthy.list("checkpoints")} == {"000003", "latest.json"}


@pytest.mark.row("P-37")
async def test_checkpoints_are_bounded_in_bytes(tmp_path):
    """Whatever `keep` says, checkpoints beyond `max_bytes` are deleted, except the newest."""
    store = FileStore(tmp_path)
    journal = Journal(MemoryLedger(), writer="controller-1")
    for step in (1, 2, 3, 4):
        await Kept(step).write(store, journal)
    size = journal.state.checkpoints[-1].num_bytes
    await delete_old_checkpoints(store, journal, CheckpointSection(keep=9, max_bytes=2 * size + 1))
    assert [kept.step for kept in journal.state.checkpoints] == [3, 4]
    await delete_old_checkpoints(store, journal, CheckpointSection(keep=9, max_bytes=1))
    assert [kept.step for kept in journal.state.checkpoints] == [4]


def tensors(version):
    return {"w": torch.full((64,), float(version))}


@pytest.mark.row("P-35")
@pytest.mark.parametrize(
    "transport", ["{0}", "file://{0}", "faulty+file://{0}?fail=0.1&lost_reply=0.05", "s3://bucket/{1}"]
)
async def test_a_run_is_resumed_from_what_its_transport_keeps(transport, tmp_path, request, monkeypatch):
    """A resume reads ledger, checkpoint and weights of every kind of run directory, and nothing from elsewhere."""
    if transport.startswith("s3"):
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": request.getfixturevalue("endpoint")}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = transport.format(tmp_path / "run", tmp_path.name)
    first = RunDirectory.open(url)
    async with open_journal(first) as (journal, _):
        for number in range(3):
            journal.record(Admitted(ticket=number, task=f"t{number}", version=0))
        publisher = await open_publisher(first.store, lineage="l", anchor_share=1.0)
        for version in range(4):
            await publisher.publish(version=version, step=version, tensors=tensors(version))
        await Kept(0).write(first.store, journal)
        journal.record(Admitted(ticket=3, task="t3", version=0))
        await journal.flush()

    # The mistake: to look on this machine for what another transport would have left here.
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    if "file" not in url and "://" in url:
        assert not (tmp_path / "run").exists()

    again = RunDirectory.open(url)
    async with open_journal(again) as (journal, log):
        found = await look_back(again.store, log, lambda _: None)
    assert [ticket.task_id for ticket in found.state.in_flight] == ["t0", "t1", "t2", "t3"]
    assert (found.cursor, found.admitted, found.state.next_number) == (b"c", ("t3",), 4)
    head = await read_head(again.store)
    assert head.version == 3
    assert (await load_head(again.store, head)).tensors.keys() == {"w"}
