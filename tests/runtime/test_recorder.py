# pyright: basic
import asyncio
from hashlib import sha256

import msgspec
import pytest

from etude.errors import StoreError
from etude.rollout.identity import HarnessIdentity
from etude.rollout.record import RolloutRecord
from etude.runtime.recorder import Recorder
from etude.runtime.watch import watching
from etude.store.faulty import Faults, FaultyStore
from etude.store.groups import decode_advantages, decode_group, group_key
from etude.store.opening import open_store
from etude.telemetry.clock import SystemClock
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import GroupReady, RolloutEnded
from etude.types import Failure, Group, Outcome, Trajectory


def record(index, group="g000001"):
    trajectory = Trajectory(
        rollout_id=f"{group}-{index}", group_id=group, task_id="t", index=index, outcome=Outcome.SCORED, reward=1.0
    )
    return RolloutRecord(trajectory=trajectory, purpose="train", instruction="do", harness=HarnessIdentity(name="mini"))


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


class Watched(MemoryLedger):
    """A ledger that knows which files were there at each flush."""

    def __init__(self, store):
        super().__init__()
        self._store = store
        self.flushes = []

    async def flush(self):
        self.flushes.append((len(self.events), await self._store.list("rollouts"), await self._store.list("groups")))


def a_group():
    trajectories = tuple(
        msgspec.structs.replace(record(index).trajectory, session_id=f"g000001-{index}-ab") for index in range(2)
    )
    return Group(group_id="g000001", task_id="t", ticket=1, admitted_version=4, trajectories=trajectories)


async def test_the_ledger_has_the_digest_of_a_file_before_the_file_is_there():
    store = open_store("memory://")
    ledger = Watched(store)
    failed = msgspec.structs.replace(
        record(1).trajectory,
        outcome=Outcome.INFRA_ERROR,
        reward=None,
        session_id="g000001-1-ab",
        failure=Failure(component="sandbox", reason="died"),
        seconds=1.25,
    )
    async with Recorder(store, ledger) as recorder:
        recorder.rollout(msgspec.structs.replace(record(1), trajectory=failed))
        await recorder.keep_group(a_group(), [0.5, -0.5])
        group_file = await store.get(group_key(4, "g000001"))
        rollout_file = await store.get("rollouts/g000001/1.json")
    ended, ready = ledger.events
    assert ended == RolloutEnded(
        rollout="g000001-1",
        session="g000001-1-ab",
        outcome="infra_error",
        reason="sandbox/died",
        seconds=1.25,
        digest=sha256(rollout_file).hexdigest(),
    )
    assert ready == GroupReady(
        ticket=1,
        key=group_key(4, "g000001"),
        digest=sha256(group_file).hexdigest(),
        rollouts=("g000001-0-ab", "g000001-1-ab"),
        drawn=0,
    )
    for events, rollouts, groups in ledger.flushes:
        assert events >= len(rollouts) + len(groups) + 1


class Full(MemoryLedger):
    """A ledger whose disk is full."""

    async def flush(self):
        raise StoreError("the disk is full")


async def kept(recorder):
    with pytest.raises(StoreError):
        await recorder.keep_group(a_group(), [0.5, -0.5])
    with pytest.raises(StoreError):
        await recorder.keep_group(a_group(), [0.5, -0.5])


async def test_a_ledger_that_cannot_be_written_keeps_files_from_being_written():
    store = open_store("memory://")
    with pytest.raises(StoreError, match="the disk is full"):
        async with Recorder(store, Full()) as recorder:
            await kept(recorder)
    assert not await store.list("groups")


async def test_a_group_that_cannot_be_stored_is_told_to_who_waits_for_it():
    with pytest.raises(StoreError):
        async with Recorder(full()) as recorder:
            await kept(recorder)


async def test_many_groups_are_kept_at_once():
    store = open_store("memory://")
    groups = [
        msgspec.structs.replace(
            a_group(),
            group_id=f"g{number:06d}",
            ticket=number,
            trajectories=(record(0, group=f"g{number:06d}").trajectory,),
        )
        for number in range(70)
    ]
    async with Recorder(store, ledger := MemoryLedger()) as recorder:
        await asyncio.gather(*(recorder.keep_group(group, [0.5]) for group in groups))
        assert len(await store.list("groups")) == 70
    assert [fact.ticket for fact in ledger.events if isinstance(fact, GroupReady)] == list(range(70))
