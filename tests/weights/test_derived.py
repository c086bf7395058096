# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Chains of views against what samplers make of the published weights themselves."""

import asyncio
import functools

import pytest
import torch

from etude.config import PoolSection
from etude.errors import FencedError
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.policy.views import FORMATS, in_view
from etude.sampling.decode_loop import Held
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.sampler import EngineSampler
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.store.retrying import RetryingStore
from etude.telemetry.clock import ManualClock
from etude.weights.derived import Deriver, view_keys
from etude.weights.follower import Follower
from etude.weights.inspection import inspect
from etude.weights.publisher import open_publisher
from etude.weights.reader import read_head
from etude.weights.tensors import flatten

SHAPE = PolicyShape(
    model_type="llama", vocab_size=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_hidden=128,
)  # fmt: skip
VIEWS = ("bf16", *FORMATS)


@functools.cache
def policy(version: int) -> dict[str, torch.Tensor]:
    """Weights that drift by about 1e-5 per version, as a policy's do."""
    if version == 0:
        return random_policy(SHAPE, seed=0).hf_tensors()
    draw = torch.Generator().manual_seed(version)
    before = policy(version - 1).items()
    return {name: tensor + 1e-5 * torch.randn(tensor.shape, generator=draw) for name, tensor in before}


def deriver(store, view: str, **options) -> Deriver:
    return Deriver(store, view=view, clock=ManualClock(), **options)


def follower(store, view: str = "") -> Follower:
    return Follower(store, clock=ManualClock(), **({"keys": view_keys(view)} if view else {}))


def assert_same_bits(one, other) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_derived_chain_holds_the_bits_that_a_sampler_makes_itself(view, dtype):
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype=dtype)
    derives, local, remote = deriver(store, view), follower(store), follower(store, view)
    assert await derives.poll() is None
    for version in range(3):
        published = await publisher.publish(version=version, step=2 * version, tensors=policy(version))
        manifest = await derives.poll()
        mine, theirs = await local.poll(), await remote.poll()
        assert_same_bits(in_view(mine.tensors, view), theirs.tensors)
        assert (theirs.lineage, theirs.version, theirs.step) == ("one", version, 2 * version)
        assert theirs.digest == mine.digest == published.digest == manifest.source
    engines = [TorchEngine(SHAPE, staged.tensors, view=view, max_batch=1) for staged in (mine, theirs)]
    assert [engine.held_digest() for engine in engines] == [manifest.digest] * 2
    assert await derives.poll() is None


async def test_samplers_of_both_sources_report_the_same_version_and_bytes():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    derives = deriver(store, "fp8")
    sources = [follower(store), follower(store, "fp8")]
    samplers = []
    await publisher.publish(version=0, step=0, tensors=policy(0))
    await derives.poll()
    for number, source in enumerate(sources):
        staged = await source.poll()
        engine = TorchEngine(SHAPE, staged.tensors, view="fp8", max_batch=1)
        held = Held(lineage=staged.lineage, version=staged.version, digest=staged.digest)
        samplers.append(EngineSampler(engine, sampler_id=f"s-{number}", pool="p", view="fp8", held=held))
    async with samplers[0], samplers[1]:
        for version in (1, 2):
            await publisher.publish(version=version, step=version, tensors=policy(version))
            manifest = await derives.poll()
            for sampler, source in zip(samplers, sources, strict=True):
                await sampler.stage(await source.poll())
            (local,), (derived,) = [await sampler.status() for sampler in samplers]
            assert local.fault == derived.fault == ""
            assert (local.version, local.digest, local.held) == (derived.version, derived.digest, derived.held)
            assert local.held == manifest.digest


async def test_a_new_lineage_is_derived_under_its_own_name():
    store = open_store("memory://")
    derives = deriver(store, "int8")
    for lineage, version in (("one", 5), ("two", 3)):
        publisher = await open_publisher(store, lineage=lineage)
        await publisher.publish(version=version, step=version, tensors=policy(version))
        manifest = await derives.poll()
        assert (manifest.lineage, manifest.version) == (lineage, version)
    staged = await follower(store, "int8").poll()
    assert (staged.lineage, staged.version) == ("two", 3)


async def test_whoever_is_started_again_goes_on_and_the_other_one_ends():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one")
    first = deriver(store, "fp8")
    for version in range(2):
        await publisher.publish(version=version, step=version, tensors=policy(version))
        await first.poll()
    second = deriver(store, "fp8")
    again = await second.poll()
    assert again.version == 1
    await publisher.publish(version=2, step=2, tensors=policy(2))
    manifest = await second.poll()
    assert manifest.base == 1
    with pytest.raises(FencedError):
        await first.poll()
    assert (await read_head(store, keys=view_keys("fp8"))).digest == manifest.digest


async def test_two_views_are_followed_over_a_store_that_fails_delays_listings_and_reorders(tmp_path):
    clock = ManualClock()
    faults = Faults(fail=0.1, lost_reply=0.05, max_delay_s=0.1, list_delay_s=2.0)
    faulty = FaultyStore(open_store(str(tmp_path)), clock=clock, faults=faults, seed=7)
    store = RetryingStore(faulty, clock=clock, attempts=40)
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    derives = deriver(store, "fp8")
    readers = {"": follower(store), "fp8": follower(store, "fp8")}
    for version in range(12):
        published = await publisher.publish(version=version, step=version, tensors=policy(version))
        derived = await derives.poll()
        staged = dict(zip(readers, await asyncio.gather(*(reader.poll() for reader in readers.values())), strict=True))
        assert staged[""].digest == staged["fp8"].digest == published.digest
        assert_same_bits(in_view(staged[""].tensors, "fp8"), staged["fp8"].tensors)
        assert derived.source == published.digest


@pytest.mark.parametrize("view", ["fp8", "fp8_block", "int8", "int4"])
async def test_a_difference_of_codes_is_a_fraction_of_one_of_weights(view):
    """At a step of a few thousandths of a weight, as a learning rate of 1e-6 makes."""
    shape = PolicyShape(
        model_type="llama", vocab_size=8, hidden=512, layers=1, heads=8, kv_heads=8, head_dim=64, ffn_hidden=1024
    )
    old = random_policy(shape, seed=0).hf_tensors()
    draw = torch.Generator().manual_seed(1)
    new = {name: tensor + 2e-7 * torch.randn(tensor.shape, generator=draw) for name, tensor in old.items()}
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16", skips=())
    derives = deriver(store, view)
    for version, tensors in enumerate((old, new)):
        published = await publisher.publish(version=version, step=version, tensors=tensors)
        derived = await derives.poll()
    sizes = [sum({(piece.object, piece.offset): piece.length for piece in made.pieces}.values())
             for made in (published, derived)]  # fmt: skip
    assert sizes[1] < 0.45 * sizes[0]


def test_a_pool_of_published_weights_has_nothing_to_derive():
    with pytest.raises(ValueError, match="which is what is published"):
        PoolSection(name="p", view_source="derived")
    assert PoolSection(name="p", view="fp8", view_source="derived").view_source == "derived"


async def test_a_view_of_other_weights_than_it_claims_is_found_by_who_verifies_its_chain():
    store = open_store("memory://")
    keys = view_keys("fp8")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    derives = deriver(store, "fp8")
    for version in range(2):
        await publisher.publish(version=version, step=version, tensors=policy(version))
        await derives.poll()
    assert not (await inspect(store, keys=keys)).problems
    sources = [(await publisher.publish(version=n, step=n, tensors=policy(n))).digest for n in range(2, 4)]
    other = {name: flatten(tensor) for name, tensor in in_view(policy(0), "fp8").items()}
    liar = await open_publisher(store, lineage="one", keys=keys)
    await liar.publish_snapshot(version=2, step=2, tensors=other, source=sources[0])
    await liar.publish_snapshot(version=3, step=3, tensors=other, source="ab" * 32)
    found = {problem.version: problem.what for problem in (await inspect(store, keys=keys)).problems}
    assert found.keys() == {2, 3}
    assert "is not what the view fp8 makes" in found[2]
    assert f"claims to be a view of abababababababab, but that version is {sources[1][:16]}" in found[3]
