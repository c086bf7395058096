# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""The whole chain in a bucket of a real S3 server: publish, follow, fence, collect."""

import asyncio

import pytest
import torch
from s3_kit import enter

from etude.errors import FencedError
from etude.policy.views import in_view
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weights.chain import WEIGHTS
from etude.weights.derived import Deriver, view_keys
from etude.weights.follower import Follower
from etude.weights.inspection import inspect
from etude.weights.leases import LeaseKeeper
from etude.weights.publisher import open_publisher
from etude.weights.reader import read_head
from etude.weights.retention import collect


@pytest.fixture
def store(seaweed, monkeypatch, request):
    enter(seaweed, monkeypatch)
    return open_store(f"s3://bucket/chains/{request.node.name}")


def weights(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version // 4)  # every fourth is dense, so that anchors come soon
    linear = torch.randn(64, 128, generator=draw) + 1e-3 * version
    return {"layer.up_proj.weight": linear, "norm.weight": torch.full((64,), float(version))}


async def test_versions_are_followed_and_old_ones_collected_but_not_under_a_readers_feet(store):
    clock = ManualClock()
    publisher = await open_publisher(store, lineage="one", skips=(4,))
    slow = Follower(store, clock=clock, lease=LeaseKeeper(store, keys=WEIGHTS, reader="slow"))
    quick = Follower(store, clock=clock)
    for version in range(14):
        published = await publisher.publish(version=version, step=version, tensors=weights(version))
        staged = await quick.poll()
        assert (staged.version, staged.digest) == (version, published.digest)
        if version == 1:
            assert (await slow.poll()).version == 1
    kept = await collect(store, clock=clock, keep=1, grace_s=0.0)
    assert (await read_head(store)).floor <= 1, f"a reader holds version 1, and {kept} is gone"
    assert (await slow.poll()).digest == published.digest
    await slow.close()
    await collect(store, clock=clock, keep=1, grace_s=0.0)
    assert (await read_head(store)).floor > 1
    new = Follower(store, clock=clock)
    assert torch.equal((await new.poll()).tensors["norm.weight"], weights(13)["norm.weight"])
    assert not (await inspect(store)).problems


async def test_of_two_trainers_the_one_that_came_last_goes_on(store):
    first = await open_publisher(store, lineage="one")
    await first.publish(version=0, step=0, tensors=weights(0))
    second = await open_publisher(store, lineage="one")
    with pytest.raises(FencedError):
        await first.publish(version=1, step=1, tensors=weights(1))
    published = await second.publish(version=1, step=1, tensors=weights(2))
    assert (await Follower(store, clock=ManualClock()).poll()).digest == published.digest


async def test_of_trainers_that_start_together_one_goes_on(store):
    publishers = await asyncio.gather(*(open_publisher(store, lineage="one") for _ in range(4)))
    publishes = (one.publish(version=0, step=0, tensors=weights(n)) for n, one in enumerate(publishers))
    results = await asyncio.gather(*publishes, return_exceptions=True)
    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1, results
    assert all(isinstance(result, FencedError) for result in results if result is not won[0])
    assert (await Follower(store, clock=ManualClock()).poll()).digest == won[0].digest


async def test_a_view_is_followed_beside_the_policy(store):
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    clock = ManualClock()
    deriver = Deriver(store, view="fp8", clock=clock)
    readers = [Follower(store, clock=clock), Follower(store, clock=clock, keys=view_keys("fp8"))]
    for version in range(5):
        await publisher.publish(version=version, step=version, tensors=weights(version))
        await deriver.poll()
        policy, view = [await reader.poll() for reader in readers]
        made = in_view(policy.tensors, "fp8")
        assert made.keys() == view.tensors.keys()
        assert all(torch.equal(made[name].float(), tensor.float()) for name, tensor in view.tensors.items())
        assert view.digest == policy.digest
