# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import asyncio
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from etude.errors import IntegrityError, StoreError
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.store.retrying import RetryingStore
from etude.telemetry.clock import ManualClock
from etude.weight_types import VersionName
from etude.weights.chain import HEAD_KEY, WEIGHTS, ChainKeys
from etude.weights.commits import Committer
from etude.weights.comparison import compare
from etude.weights.decoding import Staging
from etude.weights.directory import WeightsDirectory
from etude.weights.downloads import StoreObjects, Wanted, in_order
from etude.weights.fencing import claim
from etude.weights.follow_directory import DirectoryFollower
from etude.weights.follower import Follower, PathFollower
from etude.weights.heads import HeadWatch
from etude.weights.history import list_versions, log_versions
from etude.weights.leases import LeaseKeeper
from etude.weights.memory import HOST
from etude.weights.packing import Slice
from etude.weights.paths import find_path
from etude.weights.publisher import open_publisher
from etude.weights.ranks import RankWriter, snapshot_of
from etude.weights.reader import build, load_head, read_head
from etude.weights.tensors import flatten


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{n}.w": torch.randn(30, 20, generator=generator) + 1e-4 * version for n in range(3)}
    return tensors | {"b": torch.tensor(float(version)), "empty": torch.zeros(0, 3)}


async def publish(store, versions, *, lineage="one", keys=WEIGHTS, **options):
    publisher = await open_publisher(store, lineage=lineage, keys=keys, **options)
    return [await publisher.publish(version=n, step=n, tensors=weights(n)) for n in versions]


class Watched:
    """A store that counts answers with bytes and without."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.unchanged = 0
        self.gets: list[str] = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def get(self, key, *, max_bytes=None):
        self.gets.append(key)
        return await self._inner.get(key, max_bytes=max_bytes)

    async def get_if_changed(self, key, *, tag, max_bytes=None):
        found = await self._inner.get_if_changed(key, tag=tag, max_bytes=max_bytes)
        self.unchanged += found is None
        return found

    async def put(self, key, data, *, create_only=False):
        await self._inner.put(key, data, create_only=create_only)

    async def compare_and_swap(self, key, data, *, expected):
        return await self._inner.compare_and_swap(key, data, expected=expected)

    async def list(self, prefix):
        return await self._inner.list(prefix)


async def test_an_unchanged_head_costs_an_answer_without_bytes():
    store = Watched(open_store("memory://"))
    await publish(store, range(2))
    reader = Follower(store, clock=ManualClock())
    assert await reader.poll() is not None
    store.gets.clear()
    for _ in range(3):
        assert await reader.poll() is None
    assert (store.unchanged, store.gets) == (3, [])


class Plain:
    """A store without conditional reads."""

    def __init__(self, inner) -> None:
        self.get, self.put = inner.get, inner.put
        self.compare_and_swap, self.list = inner.compare_and_swap, inner.list


async def test_a_store_without_conditional_reads_is_followed_as_well():
    inner = open_store("memory://")
    await publish(inner, range(2))
    reader = Follower(Plain(inner), clock=ManualClock())
    assert (await reader.poll()).version == 1
    assert await reader.poll() is None
    await publish(inner, [2])
    assert (await reader.poll()).version == 2


async def test_looks_are_spread_around_their_period():
    clock = ManualClock()
    reader = Follower(open_store("memory://"), clock=clock, poll_s=10.0)
    pauses = []
    for _ in range(100):
        before = clock.now()
        await reader.paths.pause()
        pauses.append(clock.now() - before)
    assert 8.0 <= min(pauses) < 8.8
    assert 11.2 < max(pauses) <= 12.0


async def test_a_reader_that_lags_takes_the_cheapest_path_and_shows_only_its_end():
    store = open_store("memory://")
    await publish(store, range(3))
    objects = StoreObjects(store)
    reader = Follower(store, clock=ManualClock(), objects=objects)
    first = await reader.poll()
    copies = {name: tensor.clone() for name, tensor in first.tensors.items()}
    await publish(store, range(3, 14), skips=(8,))
    before, planned = objects.num_bytes, reader.paths.planned_bytes
    staged = await reader.poll()
    assert staged.version == 13
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights(13).items())
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in copies.items())
    assert objects.num_bytes - before <= reader.paths.planned_bytes - planned


async def test_of_a_long_path_one_copy_of_the_weights_is_staged():
    store = open_store("memory://")
    await publish(store, range(6), anchor_share=1e9, skips=())
    head = await read_head(store)
    path = await find_path(store, head, held=None, max_bytes=1 << 30)
    assert len(path.manifests) == 6
    staging = Staging({}, memory=HOST)
    memory = []
    for manifest in path.manifests:
        staging.begin(manifest)
        for wanted in path.wanted(WEIGHTS):
            if wanted.name in {piece.object for piece in manifest.pieces}:
                staging.add(manifest, wanted.name, await store.get(wanted.key))
        staging.end(manifest)
        memory.append({name: flat.data.ctypes.data for name, flat in staging.result().items() if flat.data.size})
    assert all(place == memory[0] for place in memory)


async def test_a_publisher_that_was_replaced_cannot_bring_its_readers_back():
    store = open_store("memory://")
    await publish(store, [0])
    old = await store.get(HEAD_KEY)
    await publish(store, [3], lineage="two")
    reader = Follower(store, clock=ManualClock(), attempts=2)
    assert (await reader.poll()).lineage == "two"
    await store.put(HEAD_KEY, old)
    with pytest.raises(IntegrityError, match="went from epoch 2 to 1"):
        await reader.poll()


async def test_a_head_that_moves_on_while_it_is_read_is_looked_at_again():
    store = open_store("memory://")
    await publish(store, [0])
    watch = HeadWatch(store)
    seen = await watch.look()
    await publish(store, [1])
    assert (await watch.look()).head.version == 1
    watch.settle(seen)
    assert (await watch.look()).head.version == 1


async def test_the_same_bytes_in_another_lineage_are_another_version():
    store = open_store("memory://")
    await publish(store, range(2))
    reader = Follower(store, clock=ManualClock())
    assert (await reader.poll()).lineage == "one"
    await publish(store, [1], lineage="two")
    staged = await reader.poll()
    assert (staged.lineage, staged.version) == ("two", 1)


async def test_chains_beside_each_other_do_not_meet():
    store, other = open_store("memory://"), ChainKeys("views/fp8")
    await publish(store, range(3))
    await publish(store, range(5), lineage="two", keys=other)
    assert (await Follower(store, clock=ManualClock()).poll()).version == 2
    staged = await Follower(store, clock=ManualClock(), keys=other).poll()
    assert (staged.version, staged.lineage) == (4, "two")
    assert [row.version for row in await list_versions(store, keys=other)] == [0, 1, 2, 3, 4]


class Slow:
    """Objects that come when they are let go, in any order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.flying: dict[str, tuple[int, asyncio.Event]] = {}

    async def fetch(self, wanted: Wanted) -> bytes:
        event = asyncio.Event()
        self.flying[wanted.name] = (wanted.size, event)
        assert len(self.flying) == 1 or sum(size for size, _ in self.flying.values()) <= self.limit
        await event.wait()
        del self.flying[wanted.name]
        return wanted.name.encode()


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 120), st.randoms())
def test_objects_come_in_order_within_their_memory_whatever_comes_first(sizes, limit, rng):
    async def main() -> None:
        slow = Slow(limit)
        wanted = [Wanted(key="", name=str(n), size=size) for n, size in enumerate(sizes)]
        got: list[bytes] = []

        async def read() -> None:
            got.extend([data async for data in in_order(slow, wanted, in_flight_bytes=limit)])

        reading = asyncio.create_task(read())
        while not reading.done():
            await asyncio.sleep(0)
            if slow.flying:
                slow.flying[rng.choice(sorted(slow.flying))][1].set()
        await reading
        assert got == [one.name.encode() for one in wanted]

    asyncio.run(main())


async def test_who_stops_reading_stops_what_is_on_its_way():
    slow = Slow(100)
    arriving = in_order(slow, [Wanted(key="", name=str(n), size=10) for n in range(5)], in_flight_bytes=100)
    first = asyncio.create_task(anext(arriving))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(slow.flying) == 5
    slow.flying["0"][1].set()
    await first
    await arriving.aclose()
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("fetch")] == []


async def test_an_object_that_comes_damaged_once_is_fetched_again():
    store = open_store("memory://")
    await publish(store, range(2))
    torn = FaultyStore(store, clock=ManualClock(), faults=Faults(torn_read=0.3), seed=3)
    head = await read_head(store)
    path = await find_path(store, head, held=None, max_bytes=1 << 30)
    loaded = await build(path, StoreObjects(torn), base=None, memory=HOST)
    assert loaded.digest == head.digest


@pytest.mark.parametrize("seed", range(2))
async def test_two_followers_across_a_bad_store_miss_no_digest_and_read_little_more_than_they_must(seed):
    """The same with 200 versions and two views: benchmarks/followers.py."""
    clock = ManualClock()
    faults = Faults(fail=0.1, lost_reply=0.02, list_delay_s=2.0, max_delay_s=0.2)
    faulty = FaultyStore(open_store("memory://"), clock=clock, faults=faults, seed=seed)
    store = RetryingStore(faulty, clock=clock, attempts=20, seed=seed)
    rng = random.Random(seed)
    sources = [StoreObjects(store), StoreObjects(store)]
    readers = [
        Follower(store, clock=clock, objects=objects, lease=LeaseKeeper(store, keys=WEIGHTS, wall=clock.now), seed=seed)
        for objects in sources
    ]
    held: list[tuple[str, int]] = [("", -1)] * 2
    version, lineage = 0, "one"
    publisher = await open_publisher(store, lineage=lineage)
    for turn in range(40):
        if turn == 20:
            version, lineage = 15, "two"
            publisher = await open_publisher(store, lineage=lineage)
        manifest = await publisher.publish(version=version, step=version, tensors=weights(version))
        for place, reader in enumerate(readers):
            if rng.random() < 0.6:
                staged = await reader.poll()
                assert staged is not None
                assert (staged.lineage, staged.version, staged.digest) == (lineage, version, manifest.digest)
                assert staged.lineage != held[place][0] or staged.version > held[place][1]
                held[place] = (staged.lineage, staged.version)
        version += 1
    for reader, objects in zip(readers, sources, strict=True):
        assert objects.num_bytes <= 1.15 * reader.paths.planned_bytes


def test_what_changed_is_told_by_tensor_and_distance():
    old = torch.full((100,), 1.0)
    new = old.clone()
    new[0], new[1], new[2], new[3] = 1.0 + 2**-23, 1.0 - 2**-24, 1.0 + 2**-21, -1.0
    same = {"same": flatten(old)}
    (change,) = compare({"w": flatten(old)} | same, {"w": flatten(new)} | same)
    assert (change.name, change.elements, change.changed) == ("w", 100, 4)
    assert (change.by_1, change.by_2, change.by_8, change.by_more) == (2, 0, 1, 1)
    assert change.density == 0.04
    kinds = {
        change.name: change.kind
        for change in compare(
            {"gone": flatten(old), "w": flatten(old)}, {"new": flatten(old), "w": flatten(old.reshape(10, 10))}
        )
    }
    assert kinds == {"gone": "removed", "new": "added", "w": "reshaped"}


async def test_the_log_goes_back_through_lineages():
    store = open_store("memory://")
    await publish(store, range(3))
    await publish(store, [1, 2], lineage="two")
    rows = [row async for row in log_versions(store)]
    assert [(row.lineage, row.version, row.step) for row in rows] == [
        ("two", 2, 2),
        ("two", 1, 1),
        ("one", 2, 2),
        ("one", 1, 1),
        ("one", 0, 0),
    ]
    assert [row.epoch for row in rows] == [2, 2, 1, 1, 1]
    assert rows[1].parent == "one/2"
    assert rows[-1].parent == ""
    assert rows[-1].anchor_bytes > 0


async def test_ranks_that_publish_parts_of_tensors_are_read_like_one(tmp_path):
    """Boxes that are no rows of their tensor, as column-parallel ranks have them."""
    store = open_store("memory://")
    committer = Committer(store, await claim(store), lineage="one")
    writers = [RankWriter(store, lineage="one") for _ in range(2)]
    older, name = [None, None], None
    reader = Follower(store, clock=ManualClock())
    for version in range(3):
        whole = np.random.default_rng(0).standard_normal((40, 30)).astype("<f4") * (1 + version * 1e-4)
        parts = [whole[:, :12], whole[:, 12:]]
        slices = [
            [
                Slice(
                    name="w",
                    dtype="F32",
                    shape=(40, 30),
                    start=(0, 12 * rank),
                    size=part.shape,
                    data=np.ascontiguousarray(part).reshape(-1).view(np.uint8),
                )
            ]
            for rank, part in enumerate(parts)
        ]
        shares = [await writer.write(new, old) for writer, new, old in zip(writers, slices, older, strict=True)]
        manifest = await committer.commit(shares, version=version, step=version, base=name)
        older = [snapshot_of(new, share) for new, share in zip(slices, shares, strict=True)]
        name = VersionName(lineage="one", version=version, digest=manifest.digest)
        staged = await reader.poll()
        assert torch.equal(staged.tensors["w"], torch.from_numpy(whole))
        directory = WeightsDirectory(tmp_path)
        await DirectoryFollower(directory, paths=PathFollower(store, clock=ManualClock())).poll()
        directory.close()
        assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.from_numpy(whole))


async def test_a_store_that_stays_away_is_told_with_what_the_reader_keeps():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults(fail=1.0))
    reader = Follower(store, clock=ManualClock(), attempts=3)
    with pytest.raises(StoreError, match="injected") as caught:
        await reader.poll()
    assert "keeps the weights it has" in caught.value.__notes__[0]


async def test_load_head_goes_on_from_what_is_held():
    store = open_store("memory://")
    await publish(store, range(3))
    held = await load_head(store, await read_head(store))
    await publish(store, [3])
    watched = Watched(store)
    loaded = await load_head(watched, await read_head(store), held=held)
    assert loaded.version == 3
    assert sum("/objects/" in key for key in watched.gets) == 2  # the page of routes, and the difference
