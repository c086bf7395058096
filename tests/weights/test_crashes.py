# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
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
from etude.weights.reader import load_version, read_head


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


FORKING = """
import asyncio, os, signal, sys, torch
from etude.errors import StoreError
from etude.store.opening import open_store
from etude.weights.publisher import open_publisher

class Killing:
    def __init__(self, inner, at, after):
        self.inner, self.left, self.after = inner, at, after
    def __getattr__(self, name):
        async def call(*arguments, **options):
            self.left -= 1
            if self.left == 0 and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return await getattr(self.inner, name)(*arguments, **options)
            finally:
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return call

def weights(version):
    return {"w": torch.arange(4000, dtype=torch.float32) * (1.0 + version / 1000), "b": torch.tensor(float(version))}

async def publish(store, versions):
    publisher = await open_publisher(store, lineage="one", anchor_share=0.01, skips=(2,))
    for version in versions:
        await publisher.publish(version=version, step=version, tensors=weights(version))

def end(signal_at, after, folder):
    asyncio.run(publish(open_store(folder), [0]))
    asyncio.run(publish(Killing(open_store(folder), signal_at, after), range(1, 3)))

torch.set_num_threads(1)
for at in range(1, 200):
    killed = 0
    for after in (0, 1):
        folder = f"{sys.argv[1]}/{at}-{after}"
        child = os.fork()
        if not child:
            end(at, after, folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or status == 0, status
        killed += os.WIFSIGNALED(status)
        print(folder, int(os.WIFSIGNALED(status)), flush=True)
    if not killed:
        break
"""


def test_a_process_that_is_killed_before_or_after_any_call_leaves_the_old_version_or_the_new_one(tmp_path):
    ended = subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    cases = [line.rpartition(" ") for line in ended.stdout.splitlines()]
    assert len(cases) > 30
    assert [killed for _, _, killed in cases[-2:]] == ["0", "0"]
    seen = 0

    async def check(folder: str) -> int:
        """Read what there is, go on with it, and return the version that was there."""
        store = open_store(folder)
        found = await newest(store)
        publisher = await open_publisher(store, lineage="one", skips=(2,))
        await publisher.publish(version=found, step=found, tensors=weights(found))
        await publisher.publish(version=found + 1, step=found + 1, tensors=weights(found + 1))
        assert await newest(store) == found + 1
        head = await read_head(store)
        assert head.epoch >= 2
        loaded = await load_version(store, lineage="one", version=0)
        assert loaded.tensors["b"].data.view("<f4")[0] == 0
        return found

    for folder, _, _ in cases:
        found = asyncio.run(check(folder))
        assert found in (seen, seen + 1)
        seen = max(seen, found)
    assert seen == 2


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
