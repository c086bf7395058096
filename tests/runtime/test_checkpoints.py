# pyright: basic
from hypothesis import given
from hypothesis import strategies as st

from etude.rollout.buffer import BufferState, Ticket
from etude.runtime.checkpoints import (
    Checkpoint,
    latest_checkpoint,
    read_trainer_files,
    trainer_file_key,
    write_checkpoint,
)
from etude.store.opening import open_store
from etude.training.checkpoint import OPTIMIZER_FILE, POLICY_FILE, STATE_FILE


def make(step, cursor=b"c"):
    ticket = Ticket(number=step, task_id="t", admitted_version=step)
    state = BufferState(
        version=step, served_version=step, next_number=step + 1, in_flight=(ticket,), unserved={step: 2}
    )
    return Checkpoint(step=step, cursor=cursor, buffer=state, seconds=1.5)


@given(st.binary(), st.integers(0, 10**6))
async def test_a_checkpoint_reads_back(cursor, step):
    store = open_store("memory://")
    assert await latest_checkpoint(store) is None
    await write_checkpoint(store, make(step, cursor))
    assert await latest_checkpoint(store) == make(step, cursor)


async def test_the_last_one_written_is_the_latest_and_earlier_ones_stay():
    store = open_store("memory://")
    for step in (5, 10):
        await write_checkpoint(store, make(step))
    assert await latest_checkpoint(store) == make(10)
    assert await store.get(trainer_file_key(5, "controller.json"))


async def test_a_crash_before_the_pointer_leaves_the_checkpoint_before():
    store = open_store("memory://")
    await write_checkpoint(store, make(5))
    for name in (POLICY_FILE, OPTIMIZER_FILE, STATE_FILE, "controller.json"):
        await store.put(trainer_file_key(10, name), b"half")
    assert await latest_checkpoint(store) == make(5)


async def test_the_trainers_files_are_found_by_name():
    store = open_store("memory://")
    names = (POLICY_FILE, OPTIMIZER_FILE, STATE_FILE)
    for name in names:
        await store.put(trainer_file_key(7, name), name.encode())
    assert await read_trainer_files(store, 7) == {name: name.encode() for name in names}
