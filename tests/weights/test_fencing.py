# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Trainers that believe that they are the only one."""

import asyncio
import random
import signal
import subprocess
import sys
from contextlib import contextmanager

import msgspec
import pytest
import torch
from msgspec.structs import replace

from etude.errors import FencedError, StoreError, VersionTakenError
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weights.background import BackgroundPublisher
from etude.weights.chain import HEAD_KEY, parse_head
from etude.weights.fencing import claim
from etude.weights.follower import Follower
from etude.weights.publisher import new_lineage, open_publisher
from etude.weights.reader import load_head, read_head


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300,), value), "b": torch.arange(7) + value}


class WatchedHead:
    """A store that remembers each head that took effect, in order."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.heads = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def compare_and_swap(self, key, data, *, expected):
        swapped = await self._inner.compare_and_swap(key, data, expected=expected)
        if swapped and key == HEAD_KEY:
            self.heads.append(parse_head(data))
        return swapped


def assert_one_history(heads) -> None:
    """Epochs grow, versions grow within a lineage, and none is named with two digests."""
    digests = {}
    for before, after in zip([None, *heads], heads, strict=False):
        assert digests.setdefault((after.lineage, after.version), after.digest) == after.digest
        if before is not None:
            assert after.epoch >= before.epoch
            assert after.epoch > before.epoch or after.writer == before.writer
            assert after.lineage != before.lineage or after.version >= before.version


async def test_who_takes_over_ends_who_was_there_before():
    store = open_store("memory://")
    first = await open_publisher(store, lineage="one")
    await first.publish(version=0, step=0, tensors=weights(0))
    second = await open_publisher(store, lineage="one")
    head = await read_head(store)
    assert (head.epoch, head.version) == (2, 0)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"epoch 2, at version 0 .*\(epoch 1\)"):
            await first.publish(version=1, step=1, tensors=weights(10))
    await second.publish(version=1, step=1, tensors=weights(1))
    with pytest.raises(FencedError):
        await first.publish(version=2, step=2, tensors=weights(20))
    loaded = await load_head(store, await read_head(store))
    assert loaded.tensors["w"].data.tobytes() == weights(1)["w"].numpy().tobytes()


async def test_of_two_that_begin_a_run_the_first_to_publish_wins():
    store = open_store("memory://")
    publishers = [await open_publisher(store, lineage=name) for name in ("one", "two")]
    await publishers[1].publish(version=0, step=0, tensors=weights(0))
    with pytest.raises(FencedError, match="another trainer"):
        await publishers[0].publish(version=0, step=0, tensors=weights(0))
    assert (await read_head(store)).lineage == "two"


async def test_two_that_begin_a_run_with_the_same_weights_are_told_apart():
    store = open_store("memory://")
    publishers = [await open_publisher(store, lineage="one") for _ in range(2)]
    await publishers[0].publish(version=0, step=0, tensors=weights(0))
    with pytest.raises(FencedError):
        await publishers[1].publish(version=0, step=0, tensors=weights(0))


async def test_a_lineage_that_ended_is_not_gone_on_with():
    store = open_store("memory://")
    for lineage in ("one", "two", "three"):
        publisher = await open_publisher(store, lineage=lineage)
        for version in range(70):
            await publisher.publish(version=version, step=version, tensors={"b": torch.arange(3) + version})
    for lineage in ("one", "two"):
        with pytest.raises(VersionTakenError, match="ended"):
            await open_publisher(store, lineage=lineage)
    assert (await read_head(store)).lineage == "three"


async def test_a_floor_that_rises_is_no_takeover():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one")
    for version in range(3):
        await publisher.publish(version=version, step=version, tensors=weights(version))
        before = await store.get(HEAD_KEY)
        raised = msgspec.json.encode(replace(parse_head(before), floor=version))
        assert await store.compare_and_swap(HEAD_KEY, raised, expected=before)
    await publisher.publish(version=3, step=3, tensors=weights(3))
    head = await read_head(store)
    assert (head.version, head.floor, head.epoch) == (3, 2, 1)


async def test_a_head_that_is_gone_is_not_replaced():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one")
    await publisher.publish(version=0, step=0, tensors=weights(0))
    await store.delete(HEAD_KEY)
    with pytest.raises(FencedError, match="nobody"):
        await publisher.publish(version=1, step=1, tensors=weights(1))


async def test_a_store_that_refuses_every_swap_is_told_from_another_publisher():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults())
    publisher = await open_publisher(store, lineage="one")
    await publisher.publish(version=0, step=0, tensors=weights(0))
    store.faults = Faults(lost_swap=1.0)
    with pytest.raises(StoreError, match="without a reason"):
        await publisher.publish(version=1, step=1, tensors=weights(1))
    with pytest.raises(StoreError, match="took it over 20 times"):
        await claim(store)
    store.faults = Faults()
    await publisher.publish(version=1, step=1, tensors=weights(1))
    assert (await read_head(store)).version == 1


FAULTS = Faults(fail=0.08, lost_reply=0.1, lost_swap=0.15, torn_write=0.03)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["memory", "file", "faulty memory", "faulty file"])
async def test_whoever_races_the_head_has_one_history(kind, seed, tmp_path):
    rng = random.Random(seed)
    inner = open_store("memory://" if "memory" in kind else str(tmp_path))
    store = WatchedHead(inner)
    fenced = published = 0

    async def trainer(number: int) -> None:
        """Train from wherever the run stands, until another one takes over; then start again."""
        nonlocal fenced, published
        mine = store
        if "faulty" in kind:
            mine = FaultyStore(store, clock=ManualClock(), faults=FAULTS, seed=seed * 10 + number)
        for life in range(3):
            steps, publisher = rng.randint(1, 4), None
            for _ in range(200):
                try:
                    if publisher is None:
                        head = await read_head(mine)
                        lineage = head.lineage if head and rng.random() < 0.7 else new_lineage(head)
                        publisher = await open_publisher(mine, lineage=lineage)
                        head = publisher.head
                        version = head.version + 1 if head and head.lineage == lineage else 0
                    value = version + number / 10 + life / 100
                    await publisher.publish(version=version, step=version, tensors=weights(value))
                except (FencedError, VersionTakenError):
                    fenced += 1
                    break
                except StoreError:
                    continue
                published += 1
                version += 1
                steps -= 1
                if not steps:
                    break

    await asyncio.gather(*(trainer(number) for number in range(3)))
    assert_one_history(store.heads)
    assert fenced
    assert published
    staged = await Follower(inner, clock=ManualClock(), attempts=1).poll()
    head = await read_head(inner)
    assert (staged.lineage, staged.version, staged.digest) == (head.lineage, head.version, head.digest)
    assert head == store.heads[-1]


TRAINER = """
import asyncio, os, signal, sys, torch
from etude.errors import EtudeError
from etude.store.opening import open_store
from etude.weights.publisher import open_publisher
async def main(url, value, stops_after):
    publisher = await open_publisher(open_store(url), lineage="one")
    version = publisher.head.version + 1 if publisher.head else 0
    while True:
        await publisher.publish(version=version, step=version, tensors={"w": torch.full((300,), version + value)})
        print(version, flush=True)
        if version == stops_after:
            os.kill(os.getpid(), signal.SIGSTOP)
        version += 1
try:
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
except EtudeError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@contextmanager
def running(*arguments):
    command = [sys.executable, "-c", TRAINER, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_zombie_that_wakes_up_after_another_process_took_over_ends(tmp_path):
    with running(tmp_path, 0.0, 2) as zombie:
        assert [int(zombie.stdout.readline()) for _ in range(3)] == [0, 1, 2]
        with running(tmp_path, 0.5, -1) as successor:
            assert int(successor.stdout.readline()) == 3
            zombie.send_signal(signal.SIGCONT)
            said, errors = zombie.communicate(timeout=60)
            assert (zombie.returncode, said) == (1, "")
            assert "FencedError" in errors
            assert "epoch 2" in errors
            last = [int(successor.stdout.readline()) for _ in range(3)][-1]
    store = open_store(str(tmp_path))
    head = asyncio.run(read_head(store))
    assert head.epoch == 2
    assert head.version >= last
    loaded = asyncio.run(load_head(store, head))
    assert loaded.tensors["w"].data.view("<f4")[0] == head.version + 0.5


def test_a_trainer_that_lost_its_run_hears_of_it_when_it_publishes_next():
    store = open_store("memory://")
    background = BackgroundPublisher(asyncio.run(open_publisher(store, lineage="one")))
    background.start(version=0, step=0, tensors=weights(0))
    background.join()
    asyncio.run(open_publisher(store, lineage="one"))
    background.start(version=1, step=1, tensors=weights(1))
    with pytest.raises(FencedError, match="this one ends"):
        background.start(version=2, step=2, tensors=weights(2))
    background.close()
