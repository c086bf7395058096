# pyright: basic, reportArgumentType=false
"""Memory and disk that fill up slowly."""

import asyncio
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from failure_kit import request, sampler

from etude.sampling.doubles import FakeEngine
from etude.store.local import FileStore
from etude.telemetry.clock import ManualClock
from etude.weights.follower import Follower
from etude.weights.publisher import open_publisher

WAITS = {
    "P-71": "planner: it refuses what does not fit before anything is loaded",
    "P-72": "planner: it computes the memory of a launch before it",
}

VERSIONS = 200
TENSOR = 1 << 17
"""Numbers of a version: 512 KiB, so that 200 kept versions are 100 MiB."""


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Hoarding(FakeEngine):
    """The mistake: every version stays loaded beside its successors."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def stage(self, tensors):
        self.loaded.append({name: tensor.clone() for name, tensor in tensors.items()})
        return super().stage(tensors)


def grown_over(engine, directory) -> int:
    """Return by how many bytes a process grows while a sampler follows 200 versions of a run.

    In a process of its own: one that ran other tests has free memory of its own to put 200 versions into.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(follow_versions, engine, directory).result()


def follow_versions(engine, directory) -> int:
    """Follow 200 versions in this process, and return by how many bytes it grew after the first twenty."""
    return asyncio.run(_follow_versions(engine(), directory))


async def _follow_versions(engine, directory) -> int:
    store = FileStore(directory)
    publisher = await open_publisher(store, lineage="l")
    follower = Follower(store, clock=ManualClock())
    weights = torch.zeros(TENSOR)
    before = 0
    async with sampler(engine, version=-1) as served:
        for version in range(VERSIONS):
            weights[version] = 1.0
            await publisher.publish(version=version, step=version, tensors={"w": weights})
            staged = await follower.poll()
            assert staged is not None
            await served.stage(staged)
            assert (await served.sample(request(f"r{version}", max_tokens=1))).versions[0].version == version
            if version == VERSIONS // 10:
                before = resident_bytes()
        (status,) = await served.status()
        assert status.version == VERSIONS - 1
    return resident_bytes() - before


@pytest.mark.slow
@pytest.mark.row("P-70")
def test_memory_does_not_grow_with_the_versions_that_a_sampler_has_held(tmp_path):
    """After 200 versions a sampler holds the last one, and its memory is what it was."""
    assert grown_over(Hoarding, tmp_path / "hoarding") > 70 << 20
    assert grown_over(FakeEngine, tmp_path / "plain") < 20 << 20
