# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import asyncio
import random
from contextlib import suppress

import pytest
import torch
from msgspec.structs import replace

from etude.errors import IntegrityError, ObjectMissingError, StoreError
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.store.retrying import RetryingStore
from etude.telemetry.clock import ManualClock
from etude.weights.chain import WEIGHTS
from etude.weights.follower import Follower, PathFollower
from etude.weights.inspection import inspect
from etude.weights.leases import LeaseKeeper, read_leases
from etude.weights.manifests import object_sizes
from etude.weights.memory import HOST
from etude.weights.paths import find_path
from etude.weights.publisher import open_publisher
from etude.weights.reader import build, load_version, read_head
from etude.weights.retention import collect, survey


class KilledError(BaseException):
    """What `kill -9` is to a process: nothing of it runs any more."""


class World:
    """A chain, and the time that its readers, its publisher and its collector share."""

    def __init__(self, store=None) -> None:
        self.clock = ManualClock()
        self.store = store or open_store("memory://")
        self.versions = 0

    def wall(self) -> float:
        return self.clock.now()

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version // 5)  # every fifth is dense, so that anchors come soon
        return {"w": torch.randn(40, 10, generator=generator) + 1e-3 * version, "b": torch.tensor(float(version))}

    async def publish(self, count: int = 1, *, lineage: str = "one") -> None:
        publisher = await open_publisher(self.store, lineage=lineage, skips=(4,))
        for _ in range(count):
            tensors = self.weights(self.versions)
            await publisher.publish(version=self.versions, step=self.versions, tensors=tensors)
            self.versions += 1

    def lease(self, **options) -> LeaseKeeper:
        return LeaseKeeper(self.store, keys=WEIGHTS, wall=self.wall, **options)

    async def collect(self, **options):
        options = {"grace_s": 600.0} | options
        return await collect(self.store, clock=self.clock, wall=self.wall, **options)


class Reader:
    """Follows, but stops on its way until it is told to arrive."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lease = world.lease()
        self.loaded = None
        self.under_way = None
        self.paths = PathFollower(world.store, clock=ManualClock(), attempts=3, lease=self.lease)

    async def start(self) -> None:
        if self.under_way is not None:
            return
        planned, go = asyncio.Event(), asyncio.Event()

        async def arrive(path, objects) -> None:
            planned.set()
            await go.wait()
            live = [lease.reader for lease in await read_leases(self.world.store, WEIGHTS, now=self.world.wall())]
            try:
                self.loaded = await build(path, objects, base=self.loaded, memory=HOST)
            except ObjectMissingError:
                assert self.lease.reader not in live
                raise

        task = asyncio.create_task(self.paths.poll(lambda: self.loaded.held if self.loaded else None, arrive))
        waiting = asyncio.create_task(planned.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self.under_way = (task, go)

    async def arrive(self) -> None:
        """Raise what went wrong on the way."""
        if self.under_way is None:
            return
        task, go = self.under_way
        self.under_way = None
        go.set()
        await task
        if self.loaded is not None:
            expected = self.world.weights(self.loaded.version)
            assert self.loaded.tensors["w"].data.tobytes() == expected["w"].numpy().tobytes()


class Dying:
    """A store whose user is killed at a call."""

    def __init__(self, inner, at: int) -> None:
        self._inner = inner
        self._left = at

    def __getattr__(self, name):
        method = getattr(self._inner, name)

        async def call(*args, **options):
            self._left -= 1
            if self._left <= 0:
                raise KilledError
            return await method(*args, **options)

        return call


async def play(rng) -> None:
    world = World()
    readers = [Reader(world), Reader(world), Reader(world)]
    lineage = "one"
    await world.publish(3)
    for _ in range(25):
        what = rng.choice(["publish", "publish", "start", "arrive", "collect", "killed", "fork", "wait"])
        reader = rng.choice(readers)
        if what == "publish":
            await world.publish(rng.randint(1, 4), lineage=lineage)
        elif what == "fork":
            lineage = f"l{world.versions}"
            await world.publish(1, lineage=lineage)
        elif what == "start":
            await reader.start()
        elif what == "arrive":
            await reader.arrive()
        elif what == "collect":
            await world.collect(keep=rng.randint(1, 2), grace_s=60.0)
        elif what == "killed":
            dying = Dying(world.store, rng.randint(1, 60))
            with suppress(KilledError):
                await collect(dying, clock=world.clock, wall=world.wall, keep=1, grace_s=60.0)
        else:
            world.clock.advance(rng.choice([1, 100, 400]))
    for reader in readers:
        await reader.arrive()
        await reader.start()
        await reader.arrive()
        head = await read_head(world.store)
        assert head is not None
        assert (reader.loaded.lineage, reader.loaded.version) == (head.lineage, head.version)
    assert not (await inspect(world.store)).problems


@pytest.mark.parametrize("seed", range(6))
async def test_no_reader_with_a_live_lease_is_cut_off_whatever_happens_when(seed):
    await play(random.Random(seed))


async def test_a_lease_keeps_what_its_reader_is_on_its_way_through():
    world = World()
    await world.publish(6)
    reader = Reader(world)
    await reader.start()
    await reader.arrive()
    await world.publish(2)
    await reader.start()  # now on its way from version 5
    await world.publish(28)
    world.clock.advance(200)
    found = await world.collect(keep=1, grace_s=10.0)
    assert found is not None
    assert found.floor <= 5
    await reader.arrive()
    assert reader.loaded.version == 7
    await reader.start()
    await reader.arrive()
    world.clock.advance(200)
    await reader.start()  # renews the lease, at where it is now
    found = await world.collect(keep=1, grace_s=10.0)
    assert found is not None
    assert found.floor > 7


async def test_an_expired_reader_gets_a_missing_object_and_goes_on_from_an_anchor():
    world = World()
    await world.publish(6)
    reader = Reader(world)
    await reader.start()
    await reader.arrive()
    await world.publish(30)
    await reader.start()
    world.clock.advance(301)
    found = await world.collect(keep=1, grace_s=10.0)
    assert found is not None
    assert found.deleted
    await reader.arrive()
    assert reader.loaded.version == 35


async def test_a_lease_that_is_written_while_the_floor_rises_is_seen_or_sees_the_floor():
    world = World()
    await world.publish(36)
    late = Reader(world)

    class Interrupting(ManualClock):
        """In the middle of the grace a reader begins that has read the head before the floor rose."""

        async def sleep(self, seconds: float) -> None:
            await world.lease(reader="late").hold("one", 0, wanted=35)
            self.advance(seconds)
            world.clock.advance(seconds)

    found = await collect(world.store, clock=Interrupting(), wall=world.wall, keep=1, grace_s=100.0)
    assert found is not None
    assert found.floor > 0
    assert not found.deleted
    await late.start()  # and one that begins now sees the floor
    await late.arrive()
    assert late.loaded.version == 35
    assert (await load_version(world.store, lineage="one", version=found.floor)).version == found.floor


async def test_a_look_changes_nothing_and_says_what_would_go():
    world = World()
    await world.publish(30)
    before = [(key, await world.store.get(key)) for key in await world.store.list("weights")]
    found = await world.collect(dry_run=True, keep=1)
    assert found is not None
    assert found.deleted
    assert before == [(key, await world.store.get(key)) for key in await world.store.list("weights")]
    done = await world.collect(keep=1)
    assert done is not None
    assert set(found.deleted) <= set(done.deleted)
    assert (await world.collect(keep=1)).deleted == ()


async def test_what_nothing_leads_to_is_kept_for_a_day_and_for_good_once_it_is_published():
    world = World()
    await world.publish(3)
    await world.store.put("weights/one/objects/" + "0" * 64, b"left by a publisher that was killed")
    found = await world.collect(keep=9)
    assert found is not None
    assert found.deleted == ()
    assert found.waiting > 1  # superseded pages of routes are among them
    world.clock.advance(86_400)
    found = await world.collect(keep=9)
    assert "weights/one/objects/" + "0" * 64 in found.deleted
    assert not (await inspect(world.store)).problems
    world.versions = 3
    await world.publish(2)


async def test_a_damaged_lease_stops_the_collection():
    world = World()
    await world.publish(30)
    await world.store.put(WEIGHTS.reader("x"), b"{")
    with pytest.raises(IntegrityError, match=r"readers/x\.json is damaged"):
        await world.collect(keep=1)


async def test_nothing_published_is_nothing_to_collect():
    assert await World().collect() is None


@pytest.mark.parametrize("kind", ["memory", "file", "faulty"])
async def test_readers_publisher_and_collector_get_along_on_any_store(kind, tmp_path):
    clock = ManualClock()
    store = open_store(str(tmp_path) if kind == "file" else "memory://")
    if kind == "faulty":
        store = RetryingStore(FaultyStore(store, clock=clock, faults=Faults(fail=0.1, lost_reply=0.05)), clock=clock)
    world = World(store)
    await world.publish(2)
    stop = asyncio.Event()
    seen = [[], [], []]

    async def read(place) -> None:
        reader = Follower(store, clock=ManualClock(), lease=world.lease(), seed=place)
        while not (stop.is_set() and seen[place] and seen[place][-1] == world.versions - 1):
            staged = await reader.poll()
            if staged is not None:
                assert torch.equal(staged.tensors["w"], world.weights(staged.version)["w"])
                seen[place].append(staged.version)
            await asyncio.sleep(0)
        await reader.close()

    async def write() -> None:
        for _ in range(12):
            await world.publish(1)
        stop.set()

    async def sweep() -> None:
        while not stop.is_set():
            await world.collect(keep=1, grace_s=0.0)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for place in range(3):
            group.create_task(read(place))
        group.create_task(write())
        group.create_task(sweep())
    assert all(versions == sorted(set(versions)) for versions in seen)
    assert await read_leases(store, WEIGHTS, now=world.wall()) == []
    await world.collect(keep=1, grace_s=0.0)
    assert not (await inspect(store)).problems


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_the_floor_is_an_anchor_that_as_many_follow(keep):
    world = World()
    await world.publish(30)
    found = await world.collect(keep=keep)
    assert found is not None
    surveyed = await survey(world.store, WEIGHTS, keep=keep, now=world.wall())
    assert surveyed is not None
    assert surveyed.floor == found.floor
    loaded = await load_version(world.store, lineage="one", version=found.floor)
    assert loaded.version == found.floor
    if found.floor:
        with pytest.raises(StoreError):
            await load_version(world.store, lineage="one", version=found.floor - 1)


async def test_a_collector_killed_at_any_call_is_gone_on_with():
    made = World()
    await made.publish(12)
    parts = {key: await made.store.get(key) for key in await made.store.list("weights")}
    whole = await made.collect(keep=1, grace_s=60.0)
    left = await made.store.list("weights")
    at, ended = 1, False
    while not ended:
        world = World()
        for key, data in parts.items():
            await world.store.put(key, data)
        try:
            dying = Dying(world.store, at)
            await collect(dying, clock=world.clock, wall=world.wall, keep=1, grace_s=60.0)
            ended = True
        except KilledError:
            assert not (await inspect(world.store)).problems
        again = await world.collect(keep=1, grace_s=60.0)
        assert again.floor == whole.floor
        assert await world.store.list("weights") == left
        at += 7
    assert at > 100


class Meanwhile(ManualClock):
    """Something happens while the collector waits."""

    def __init__(self, world, what) -> None:
        super().__init__()
        self.world = world
        self.what = what
        self.waited = 0.0

    async def sleep(self, seconds: float) -> None:
        self.waited += seconds
        await self.what()
        self.world.clock.advance(seconds)


@pytest.mark.parametrize("behind_s", [400.0, 1e6])
@pytest.mark.parametrize("old_marks", [False, True])
async def test_a_reader_whose_clock_is_behind_keeps_what_it_needs(behind_s, old_marks):
    world = World()
    world.clock.advance(2e6)
    await world.publish(4)
    keeper = LeaseKeeper(world.store, keys=WEIGHTS, reader="slow", wall=lambda: world.wall() - behind_s)
    await keeper.hold("one", 0, wanted=3)
    await world.publish(30)

    async def renew() -> None:
        world.clock.advance(200)
        await keeper.hold("one", 0, wanted=3)

    if old_marks:  # of a collection that was cut off after it had marked what it found
        clock = Meanwhile(world, renew)
        clock.sleep = None
        with suppress(TypeError):
            await collect(world.store, clock=clock, wall=world.wall, keep=1)
        world.clock.advance(10_000)
        await keeper.hold("one", 0, wanted=3)
    clock = Meanwhile(world, renew)
    found = await collect(world.store, clock=clock, wall=world.wall, keep=1)
    assert clock.waited >= 300.0
    assert found.deleted == ()
    assert (await load_version(world.store, lineage="one", version=world.versions - 1)).version == 33
    for version in range(4):
        path = await find_path_below_the_floor(world, version)
        assert path.manifests


async def find_path_below_the_floor(world, version):
    head = replace(await read_head(world.store), floor=0)
    return await find_path(world.store, head, held=None, target=("one", version), max_bytes=1 << 40)


async def test_leases_of_readers_that_are_long_gone_are_deleted_and_not_waited_for_again():
    world = World()
    await world.publish(4)
    for number in range(3):
        await world.lease(reader=f"gone-{number}").hold("one", 3, wanted=3)
    await world.publish(30)
    world.clock.advance(90_000)
    await world.lease(reader="live").hold("one", world.versions - 1, wanted=world.versions - 1)
    clock = Meanwhile(world, lambda: asyncio.sleep(0))
    found = await collect(world.store, clock=clock, wall=world.wall, keep=1)
    assert found.deleted
    assert await world.store.list(WEIGHTS.readers) == [WEIGHTS.reader("live")]


class Publishing:
    """Once something was deleted, a version is published whose anchor has the bytes of one that is about to go."""

    def __init__(self, world) -> None:
        self._world = world
        self._done = False

    def __getattr__(self, name):
        return getattr(self._world.store, name)

    async def delete(self, key: str) -> None:
        await self._world.store.delete(key)
        if not self._done:
            self._done = True
            publisher = await open_publisher(self._world.store, lineage="one", anchor_share=0.0)
            await publisher.publish(version=99, step=99, tensors=self._world.weights(0))


async def test_what_is_published_again_during_a_collection_is_not_collected():
    world = World()
    await world.publish(36)
    going = await world.collect(keep=1, grace_s=10.0, dry_run=True)
    first = await find_path_below_the_floor(world, 0)
    needed = {WEIGHTS.object("one", name) for name in object_sizes(first.manifests[0])}
    assert needed <= set(going.deleted)
    found = await collect(Publishing(world), clock=ManualClock(), wall=world.wall, keep=1, grace_s=0.0)
    assert found.deleted
    assert not needed & set(found.deleted)
    assert not (await inspect(world.store)).problems
