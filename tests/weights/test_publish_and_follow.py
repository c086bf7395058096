# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import asyncio
import random
import threading

import pytest
import torch

from etude.errors import FencedError, IntegrityError, RunError, StoreError
from etude.interfaces import WeightSource
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weights.background import BackgroundPublisher
from etude.weights.chain import HEAD_KEY, WEIGHTS
from etude.weights.follower import Follower, StagedVersion
from etude.weights.publisher import new_lineage, open_publisher
from etude.weights.reader import load_version, read_head


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{n}.w": torch.randn(17, 9, generator=generator) + 1e-4 * version for n in range(4)}
    return tensors | {"scalar": torch.tensor(float(version)), "empty": torch.zeros(0, 3), "ids": torch.arange(version)}


def follower(store, **options) -> Follower:
    return Follower(store, clock=ManualClock(), **options)


def assert_is(staged: StagedVersion | None, version: int) -> StagedVersion:
    assert staged is not None
    assert staged.version == version
    assert staged.tensors.keys() == weights(version).keys()
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights(version).items())
    return staged


async def publish(store, versions, *, lineage="one", anchor_share=2.0):
    publisher = await open_publisher(store, lineage=lineage, anchor_share=anchor_share)
    return [await publisher.publish(version=n, step=n, tensors=weights(n)) for n in versions]


async def test_a_follower_sees_each_version_bit_for_bit():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", anchor_share=2.0)
    reader = follower(store)
    assert await reader.poll() is None
    for n in range(10):
        manifest = await publisher.publish(version=n, step=n, tensors=weights(n))
        staged = assert_is(await reader.poll(), n)
        assert (staged.digest, staged.lineage, staged.step) == (manifest.digest, "one", n)
        assert await reader.poll() is None


async def test_a_lagging_follower_skips_to_the_newest_and_reads_no_more_than_it_needs():
    store = open_store("memory://")
    await publish(store, range(3))
    reader = follower(store)
    assert_is(await reader.poll(), 2)
    manifests = await publish(store, range(3, 11))
    assert [manifest.base for manifest in manifests] == list(range(2, 10))
    assert_is(await reader.poll(), 10)
    assert await reader.poll() is None


async def test_an_older_version_can_be_loaded_while_the_run_goes_on():
    store = open_store("memory://")
    manifests = await publish(store, range(7))
    loaded = await load_version(store, lineage="one", version=5)
    assert (loaded.version, loaded.digest) == (5, manifests[5].digest)


async def test_versions_may_leave_gaps():
    store = open_store("memory://")
    await publish(store, [0, 3, 10])
    assert_is(await follower(store).poll(), 10)


async def test_a_resumed_publisher_goes_on_with_differences():
    store = open_store("memory://")
    await publish(store, range(2))
    (manifest,) = await publish(store, [2])
    assert manifest.base == 1
    assert_is(await follower(store).poll(), 2)


async def test_a_new_lineage_starts_with_an_anchor_and_followers_take_it_whole():
    store = open_store("memory://")
    await publish(store, range(4))
    reader = follower(store)
    assert_is(await reader.poll(), 3)
    lineage = new_lineage(await read_head(store))
    assert lineage != new_lineage(await read_head(store))
    manifests = await publish(store, [2, 3], lineage=lineage)
    assert [manifest.base for manifest in manifests] == [None, 2]
    staged = assert_is(await reader.poll(), 3)
    assert staged.lineage == lineage


async def test_a_version_is_never_published_with_other_bytes():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one")
    first = await publisher.publish(version=1, step=1, tensors=weights(1))
    assert await publisher.publish(version=1, step=1, tensors=weights(1)) == first
    with pytest.raises(StoreError, match="other bytes"):
        await publisher.publish(version=1, step=1, tensors=weights(2))
    with pytest.raises(StoreError, match="older"):
        await publisher.publish(version=0, step=0, tensors=weights(0))
    assert_is(await follower(store).poll(), 1)


async def test_a_version_that_the_head_never_named_may_be_made_anew_with_other_bytes():
    store = open_store("memory://")
    await publish(store, [0])
    before = await store.get(HEAD_KEY)
    await publish(store, [1])
    await store.put(HEAD_KEY, before)
    publisher = await open_publisher(store, lineage="one")
    await publisher.publish(version=1, step=1, tensors=weights(2) | {"ids": torch.arange(1)})
    loaded = await load_version(store, lineage="one", version=1)
    assert loaded.digest == publisher.head.digest


async def test_of_two_publishers_one_wins_and_the_other_is_told():
    store = open_store("memory://")
    await publish(store, [0])
    first = await open_publisher(store, lineage="first")
    second = await open_publisher(store, lineage="second")
    results = await asyncio.gather(
        first.publish(version=1, step=1, tensors=weights(1)),
        second.publish(version=1, step=1, tensors=weights(1)),
        return_exceptions=True,
    )
    assert isinstance(results[0], FencedError)
    assert "another trainer" in str(results[0])
    head = await read_head(store)
    assert head is not None
    assert head.lineage == "second"
    assert_is(await follower(store).poll(), 1)


async def test_names_that_readers_refuse_never_become_the_head():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one")
    with pytest.raises(IntegrityError):
        await publisher.publish(version=0, step=0, tensors={"../w": torch.zeros(1)})
    assert await read_head(store) is None


async def flip(store, key: str, rng: random.Random) -> None:
    data = bytearray(await store.get(key))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    await store.put(key, bytes(data))


@pytest.mark.parametrize("seed", range(40))
async def test_a_flipped_bit_anywhere_in_the_chain_is_never_staged(seed):
    store = open_store("memory://")
    manifests = await publish(store, range(3))
    rng = random.Random(seed)
    keys = [HEAD_KEY]
    keys += [key for key in await store.list("weights/one") if "/manifests/" in key]
    keys += [WEIGHTS.object("one", manifest.pieces[0].object) for manifest in manifests]
    head = await read_head(store)
    keys.append(WEIGHTS.object("one", head.routes))
    await flip(store, rng.choice(keys), rng)
    reader = follower(store, attempts=2)
    try:
        staged = await reader.poll()
    except StoreError:
        return
    # A bit that says nothing about the weights, such as one of the epoch's number, or one that nobody had to read.
    assert_is(staged, 2)


async def test_damaged_weights_in_memory_are_replaced_from_the_anchor():
    store = open_store("memory://")
    await publish(store, range(2))
    reader = follower(store)
    staged = await reader.poll()
    assert staged is not None
    staged.tensors["layers.0.w"].zero_()
    await publish(store, [2])
    assert_is(await reader.poll(), 2)


async def test_a_damaged_difference_is_refused_by_type_until_an_anchor_passes_it():
    store = open_store("memory://")
    manifests = await publish(store, range(2))
    reader = follower(store)
    assert_is(await reader.poll(), 1)
    manifests = await publish(store, [2])
    await flip(store, WEIGHTS.object("one", manifests[0].pieces[0].object), random.Random(0))
    with pytest.raises(IntegrityError, match="damaged"):
        await reader.poll()
    publisher = await open_publisher(store, lineage="two")
    await publisher.publish(version=3, step=3, tensors=weights(3))
    assert_is(await reader.poll(), 3)


async def test_a_head_that_goes_back_within_its_lineage_is_refused():
    store = open_store("memory://")
    await publish(store, [0])
    old = await store.get(HEAD_KEY)
    await publish(store, [1])
    reader = follower(store)
    assert_is(await reader.poll(), 1)
    await store.put(HEAD_KEY, old)
    with pytest.raises(IntegrityError, match="went from version 1 to 0"):
        await reader.poll()


async def test_weights_too_large_for_this_reader_are_refused_before_they_are_fetched():
    store = open_store("memory://")
    await publish(store, [0])
    with pytest.raises(IntegrityError, match="more than the 100 allowed"):
        await follower(store, max_bytes=100, attempts=1).poll()


@pytest.mark.parametrize("seed", range(6))
async def test_publisher_and_follower_get_through_a_store_that_keeps_failing(seed):
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults(), seed=seed)
    publisher = await open_publisher(store, lineage="one", anchor_share=2.0)
    reader = follower(store, attempts=12)
    store.faults = Faults(fail=0.1, lost_reply=0.1, lost_swap=0.2, torn_read=0.05, max_delay_s=0.5)
    for n in range(8):
        refused = ""
        for _ in range(50):
            try:
                await publisher.publish(version=n, step=n, tensors=weights(n))
                break
            except StoreError as error:
                refused = str(error)
        else:
            pytest.fail(f"version {n} was never published: {refused}")
        assert_is(await reader.poll(), n)


async def test_a_follower_that_cannot_reach_the_store_says_how_often_it_tried():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults(fail=1.0))
    reader = follower(store, attempts=3)
    with pytest.raises(StoreError, match="injected") as caught:
        await reader.poll()
    assert "after 3 attempts" in caught.value.__notes__[0]
    assert reader.waiting_for.startswith("attempt 3 of 3")


async def test_staged_yields_versions_as_they_come():
    store = open_store("memory://")
    reader = follower(store)
    await publish(store, [0])
    seen = []
    source: WeightSource = reader
    async for staged in source.staged():
        seen.append(staged.version)
        if len(seen) == 3:
            break
        await publish(store, [staged.version + 1])
    assert seen == [0, 1, 2]


def test_publishing_in_the_background_copies_first_and_joins_before_the_next(tmp_path):
    store = open_store(str(tmp_path))
    background = BackgroundPublisher(asyncio.run(open_publisher(store, lineage="one")))
    assert background.join() is None
    tensors = weights(0)
    for n in range(3):
        tensors = weights(n)
        background.start(version=n, step=n, tensors=tensors)
        for tensor in tensors.values():
            tensor.zero_()
    background.close()
    assert_is(asyncio.run(follower(store).poll()), 2)


def test_an_error_in_the_background_reaches_the_next_call():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults())
    background = BackgroundPublisher(asyncio.run(open_publisher(store, lineage="one")))
    store.faults = Faults(fail=1.0)
    background.start(version=0, step=0, tensors=weights(0))
    with pytest.raises(StoreError, match="injected"):
        background.start(version=1, step=1, tensors=weights(1))
    store.faults = Faults()
    background.start(version=0, step=0, tensors=weights(0))
    background.close()
    assert_is(asyncio.run(follower(store).poll()), 0)


class StuckClock(ManualClock):
    """A wait that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    async def sleep(self, seconds: float) -> None:
        await asyncio.to_thread(self.released.wait)


def test_a_publish_that_hangs_ends_the_wait_with_a_name_and_a_deadline():
    clock = StuckClock()
    store = FaultyStore(open_store("memory://"), clock=clock, faults=Faults())
    background = BackgroundPublisher(asyncio.run(open_publisher(store, lineage="one")), timeout_s=0.05)
    store.faults = Faults(max_delay_s=1.0)
    background.start(version=7, step=7, tensors=weights(7))
    try:
        with pytest.raises(RunError, match="publishing version 7 took over"):
            background.join()
    finally:
        clock.released.set()
        background.close()


@pytest.mark.parametrize("difference", ["rice_ulp", "exp_ctx"])
async def test_a_follower_reads_whichever_difference_is_published(difference):
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16", difference=difference)
    follower = Follower(store, clock=ManualClock())
    weights = {f"layer{index}.w": torch.randn(50, 400) * 0.02 for index in range(3)}
    for version in range(3):
        stepped = {name: tensor * (1 + version * 1e-3) for name, tensor in weights.items()}
        manifest = await publisher.publish(version=version, step=version, tensors=stepped)
        staged = await follower.poll()
        assert staged is not None
        assert staged.digest == manifest.digest
        assert all(torch.equal(staged.tensors[name], tensor.bfloat16()) for name, tensor in stepped.items())
    (piece,) = manifest.pieces
    assert (piece.encoding, len(piece.boxes)) == (difference, 3)
