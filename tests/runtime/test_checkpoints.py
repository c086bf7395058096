# pyright: basic
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import CheckpointSection
from etude.errors import IntegrityError
from etude.rollout.buffer import Ticket
from etude.runtime.checkpoints import (
    POINTER_KEY,
    Checkpoint,
    delete_old_checkpoints,
    latest_checkpoint,
    read_trainer_files,
    trainer_file_key,
    write_checkpoint,
)
from etude.runtime.journal import Journal, Position
from etude.runtime.run_state import RunState
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import CheckpointDeleted, CheckpointWritten
from etude.training.checkpoint import OPTIMIZER_FILE, POLICY_FILE, STATE_FILE, digest_of
from etude.training.records import StoredFile

NAMES = (POLICY_FILE, OPTIMIZER_FILE, STATE_FILE)


def make(step, cursor=b"c"):
    ticket = Ticket(number=step, task_id="t", admitted_version=step)
    state = RunState(lineage="0001-a", version=step, next_number=step + 1, in_flight=(ticket,))
    return Checkpoint(
        step=step, cursor=cursor, state=state, position=Position(writer="controller-1", events=3), seconds=1.5
    )


class Run:
    """A store with a controller's journal; `write` leaves a checkpoint with trainer files of 100 bytes each."""

    def __init__(self, store=None):
        self.store = store or open_store("memory://")
        self.ledger = MemoryLedger()
        self.journal = Journal(self.ledger, writer="controller-1")

    async def write(self, step, cursor=b"c"):
        files = {name: bytes([step % 256]) * 100 for name in NAMES}
        for name, data in files.items():
            await self.store.put(trainer_file_key(step, name), data)
        stored = {name: StoredFile(num_bytes=len(data), digest=digest_of(data)) for name, data in files.items()}
        await write_checkpoint(self.store, self.journal, make(step, cursor), stored)

    @property
    def kept(self):
        return [checkpoint.step for checkpoint in self.journal.state.checkpoints]


async def steps_in(store):
    return sorted({int(key.split("/")[1]) for key in await store.list("checkpoints") if key != POINTER_KEY})


@given(st.binary(), st.integers(0, 10**6))
async def test_a_checkpoint_reads_back(cursor, step):
    run = Run()
    assert await latest_checkpoint(run.store) is None
    await run.write(step, cursor)
    assert await latest_checkpoint(run.store) == make(step, cursor)
    assert (await read_trainer_files(run.store, step)).keys() == set(NAMES)


async def test_the_ledger_has_the_digest_of_every_file_before_the_pointer_moves():
    run = Run()
    await run.write(5)
    [written] = run.ledger.events
    assert isinstance(written, CheckpointWritten)
    keys = [key for key in await run.store.list("checkpoints") if key != POINTER_KEY]
    assert {key: digest_of(await run.store.get(key)) for key in keys} == written.files
    assert written.num_bytes == sum([len(await run.store.get(key)) for key in keys])


async def test_a_crash_before_the_pointer_leaves_the_checkpoint_before():
    run = Run()
    await run.write(5)
    for name in (*NAMES, "controller.json"):
        await run.store.put(trainer_file_key(10, name), b"half")
    assert await latest_checkpoint(run.store) == make(5)


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "pointer"])
async def test_a_damaged_checkpoint_is_refused(damage):
    run = Run()
    await run.write(5)
    key = POINTER_KEY if damage == "pointer" else trainer_file_key(5, "controller.json")
    data = await run.store.get(key)
    if damage == "changed":
        await run.store.put(key, msgspec.json.encode(make(5, b"other")))
    elif damage == "gone":
        await run.store.delete(key)
    else:
        await run.store.put(key, data[:-3])
    with pytest.raises(IntegrityError):
        await latest_checkpoint(run.store)


async def test_only_the_newest_checkpoints_are_kept():
    run = Run()
    for step in (5, 10, 15):
        await run.write(step)
        assert not await delete_old_checkpoints(run.store, run.journal, CheckpointSection(keep=2))
    assert await steps_in(run.store) == run.kept == [10, 15]
    assert [event.step for event in run.ledger.events if isinstance(event, CheckpointDeleted)] == [5]


async def test_bytes_bound_what_is_kept_but_never_the_newest():
    run = Run()
    for step in (5, 10, 15):
        await run.write(step)
    size = run.journal.state.checkpoints[-1].num_bytes
    assert not await delete_old_checkpoints(run.store, run.journal, CheckpointSection(keep=9, max_bytes=2 * size))
    assert await steps_in(run.store) == run.kept == [10, 15]
    assert not await delete_old_checkpoints(run.store, run.journal, CheckpointSection(keep=9, max_bytes=1))
    assert await steps_in(run.store) == run.kept == [15]


async def test_a_deletion_that_fails_is_a_warning_and_is_made_up_for_later():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults())
    run = Run(store)
    for step in (5, 10):
        await run.write(step)
    store.faults = Faults(fail=0.5)
    warnings = await delete_old_checkpoints(store, run.journal, CheckpointSection(keep=1))
    assert warnings
    assert run.kept == [10]
    store.faults = Faults()
    assert not await delete_old_checkpoints(store, run.journal, CheckpointSection(keep=1))
    assert await steps_in(store) == [10]


async def test_what_a_crash_left_of_a_checkpoint_is_cleaned_up():
    run = Run()
    await run.write(5)
    await run.store.put(trainer_file_key(7, POLICY_FILE), b"half")
    assert not await delete_old_checkpoints(run.store, run.journal, CheckpointSection())
    assert await steps_in(run.store) == [5]
