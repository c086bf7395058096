# pyright: basic
import asyncio
import random
import subprocess
import sys

import pytest
import torch

from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weights.follower import Follower
from etude.weights.publisher import new_lineage, open_publisher
from etude.weights.reader import read_head


class KilledError(BaseException):
    """What `kill -9` is to a process: nothing of it runs any more."""


class CrashingStore:
    """Dies at the call that it is told, before or after that took effect."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self._calls_left = 0
        self._after = False

    def die(self, *, at: int, after: bool) -> None:
        self._calls_left = at
        self._after = after

    async def _call(self, coroutine):
        self._calls_left -= 1
        if self._calls_left == 0:
            if self._after:
                await coroutine
            else:
                coroutine.close()
            raise KilledError
        return await coroutine

    async def get(self, key, *, max_bytes=None):
        return await self._call(self._inner.get(key, max_bytes=max_bytes))

    async def put(self, key, data, *, create_only=False):
        return await self._call(self._inner.put(key, data, create_only=create_only))

    async def compare_and_swap(self, key, data, *, expected):
        return await self._call(self._inner.compare_and_swap(key, data, expected=expected))

    async def get_range(self, key, start, length):
        return await self._call(self._inner.get_range(key, start, length))

    async def get_if_changed(self, key, *, tag, max_bytes=None):
        return await self._call(self._inner.get_if_changed(key, tag=tag, max_bytes=max_bytes))

    async def delete(self, key):
        return await self._call(self._inner.delete(key))

    async def list(self, prefix):
        return await self._call(self._inner.list(prefix))


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(4000, dtype=torch.float32) * (1.0 + version / 1000), "b": torch.tensor(float(version))}


async def newest(store) -> int:
    """Return the version a new reader gets, its tensors checked against what that version has to be."""
    staged = await Follower(store, clock=ManualClock(), attempts=1).poll()
    assert staged is not None
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights(staged.version).items())
    return staged.version


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("anchor_share", [0.01, 4.0])
async def test_a_crash_at_any_call_leaves_the_old_version_or_the_new_one(anchor_share, after):
    for at in range(1, 30):
        store = open_store("memory://")
        publisher = await open_publisher(store, lineage="one", anchor_share=anchor_share)
        await publisher.publish(version=0, step=0, tensors=weights(0))
        crashing = CrashingStore(store)
        crashing.die(at=at, after=after)
        try:
            dying = await open_publisher(crashing, lineage="one", anchor_share=anchor_share)
            await dying.publish(version=1, step=1, tensors=weights(1))
        except KilledError:
            survived = False
        else:
            survived = True
        found = await newest(store)
        assert found == 1 if survived else found in (0, 1)
        for lineage in ("one", new_lineage(await read_head(store))):
            resumed = await open_publisher(store, lineage=lineage, anchor_share=anchor_share)
            await resumed.publish(version=2, step=2, tensors=weights(2))
            assert await newest(store) == 2
        if survived:
            return
    pytest.fail("it never got through")


ENDLESS = """
import asyncio, sys, torch
from etude.store.opening import open_store
from etude.weights.publisher import open_publisher
async def main():
    publisher = await open_publisher(open_store(sys.argv[1]), lineage="one")
    version = publisher.head.version + 1 if publisher.head else 0
    while True:
        scale = 1.0 + version / 1000
        tensors = {"w": torch.arange(4000, dtype=torch.float32) * scale, "b": torch.tensor(float(version))}
        await publisher.publish(version=version, step=version, tensors=tensors)
        print(version, flush=True)
        version += 1
asyncio.run(main())
"""


def test_a_publisher_killed_at_a_random_moment_leaves_a_chain_that_is_read_and_continued(tmp_path):
    rng = random.Random(0)
    store = open_store(str(tmp_path))
    said = -1
    for _ in range(2):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
            assert publisher.stdout is not None
            for _ in range(rng.randint(1, 40)):
                said = int(publisher.stdout.readline())
            publisher.kill()
            said = max([said, *(int(line) for line in publisher.stdout if line.endswith("\n"))])
        assert asyncio.run(newest(store)) in (said, said + 1)
        said = asyncio.run(newest(store))
