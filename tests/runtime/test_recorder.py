# pyright: basic
import asyncio

import msgspec
import pytest

from etude.errors import StoreError
from etude.rollout.record import RolloutRecord
from etude.runtime.recorder import Recorder
from etude.runtime.watch import watching
from etude.store.faulty import Faults, FaultyStore
from etude.store.groups import decode_advantages, decode_group, group_key
from etude.store.opening import open_store
from etude.telemetry.clock import SystemClock
from etude.types import Group, Outcome, Trajectory


def record(index, group="g000001"):
    trajectory = Trajectory(
        rollout_id=f"{group}-{index}", group_id=group, task_id="t", index=index, outcome=Outcome.SCORED, reward=1.0
    )
    return RolloutRecord(trajectory=trajectory, purpose="train", instruction="do", harness="mini")


def full():
    """A store that refuses every write."""
    return FaultyStore(open_store("memory://"), clock=SystemClock(), faults=Faults(fail=1.0))


async def test_what_was_handed_in_is_stored_after_flush():
    store = open_store("memory://")
    group = Group(group_id="g000001", task_id="t", ticket=1, admitted_version=4, trajectories=(record(0).trajectory,))
    async with Recorder(store) as recorder:
        recorder.rollout(record(0))
        recorder.group(group, [0.5])
        await recorder.flush()
        document = msgspec.json.decode(await store.get("rollouts/g000001/0.json"))
        assert document["trajectory_id"] == "g000001-0"
        stored = await store.get(group_key(4, "g000001"))
        assert decode_group(stored) == group
        assert decode_advantages(stored) == (0.5,)


async def test_leaving_writes_what_waits():
    store = open_store("memory://")
    async with Recorder(store) as recorder:
        for index in range(20):
            recorder.rollout(record(index))
    assert len(await store.list("rollouts")) == 20


async def test_writes_keep_their_order():
    store = open_store("memory://")
    async with Recorder(store) as recorder:
        for reward in (0.0, 1.0, 0.25):
            changed = msgspec.structs.replace(record(0).trajectory, reward=reward)
            recorder.rollout(msgspec.structs.replace(record(0), trajectory=changed))
    document = msgspec.json.decode(await store.get("rollouts/g000001/0.json"))
    assert document["extra"]["etude"]["reward"] == 0.25


async def flushed(recorder):
    recorder.rollout(record(0))
    with pytest.raises(StoreError):
        await recorder.flush()


async def watched(recorder):
    with pytest.raises(StoreError):
        async with watching([recorder]):
            await handed_in_and_waited(recorder)


async def handed_in_and_waited(recorder):
    recorder.rollout(record(0))
    await asyncio.Event().wait()


@pytest.mark.parametrize("block", [flushed, watched])
async def test_a_store_that_refuses_is_told_at_flush_to_who_watches_and_on_leaving(block):
    with pytest.raises(StoreError):
        async with Recorder(full()) as recorder:
            await block(recorder)
