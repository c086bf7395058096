# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""What a publisher stores, when, how often and in how much memory."""

import asyncio
import itertools
import tempfile
import tracemalloc

import numpy as np
import pytest
import torch

from etude.errors import HostError, IntegrityError, StoreError
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weight_types import PageName
from etude.weights.background import BackgroundPublisher
from etude.weights.chain import HEAD_KEY
from etude.weights.follower import Follower
from etude.weights.packing import groups, slices
from etude.weights.paths import read_manifest, read_routes
from etude.weights.publisher import new_lineage, open_publisher
from etude.weights.reader import load_head, load_version, read_head
from etude.weights.tensors import FlatTensor, flatten
from etude.weights.uploads import OBJECT_BYTES

MEBIBYTE = 1 << 20


class CountingStore:
    """Counts what is put, and how much at a time; `broken` names what fails next.

    Nothing is put before `gathers` puts are under way.
    """

    def __init__(self, inner) -> None:
        self._inner = inner
        self.puts: list[str] = []
        self.broken = ""
        self.under_way = self.most_under_way = self.gathers = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def put(self, key, data, *, create_only=False):
        if self.broken and self.broken in key:
            raise StoreError(f"no space for {key}")
        self.puts.append(key)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        while self.gathers > self.most_under_way:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await self._inner.put(key, data, create_only=create_only)
        self.under_way -= 1

    async def compare_and_swap(self, key, data, *, expected):
        if self.broken and self.broken in key:
            raise StoreError(f"no answer for {key}")
        return await self._inner.compare_and_swap(key, data, expected=expected)

    def taken(self, kind: str) -> list[str]:
        """Return what was put of a kind since the last call."""
        found = [key for key in self.puts if f"/{kind}/" in key]
        self.puts = [key for key in self.puts if key not in found]
        return found


def large(seed: int, *, mebibytes: int = 17) -> dict[str, FlatTensor]:
    """Weights that no code makes smaller: several objects."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, mebibytes * MEBIBYTE, dtype=np.uint8)
    return {"w": FlatTensor(dtype="U8", shape=(mebibytes, MEBIBYTE), data=data)}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(60, 200, generator=generator).bfloat16()
    for step in range(version):
        made[step % 60, ::7] *= 1.01
    return {"w": made, "step": torch.tensor(version)}


async def routes_of(store):
    head = await read_head(store)
    return await read_routes(store, PageName(head.lineage, head.routes), lineage=head.lineage, since=0)


async def test_a_publish_that_is_repeated_after_an_error_uploads_only_what_is_missing():
    store = CountingStore(open_store("memory://"))
    publisher = await open_publisher(store, lineage="one")
    for broken in ("/manifests/", "/head"):
        store.broken = broken
        with pytest.raises(StoreError, match="no "):
            await publisher.publish_snapshot(version=0, step=0, tensors=large(0))
    store.broken = ""
    await publisher.publish_snapshot(version=0, step=0, tensors=large(0))
    manifest = await read_manifest(store, "one", (await routes_of(store))[0])
    objects = {piece.object for piece in manifest.pieces}
    put = [key.rpartition("/")[2] for key in store.taken("objects")]
    assert len(objects) >= 2
    assert all(put.count(name) == 1 for name in objects)


async def test_a_publisher_that_is_started_anew_uploads_only_what_its_predecessor_did_not():
    store = CountingStore(open_store("memory://"))
    first = await open_publisher(store, lineage="one")
    await first.publish_snapshot(version=0, step=0, tensors=large(0))
    store.broken = "/manifests/"
    with pytest.raises(StoreError):
        await first.publish_snapshot(version=1, step=1, tensors=large(1))
    store.broken = ""
    stored = store.taken("objects")[-3:]
    half = stored[1]
    await store.put(half, (await store.get(half))[:1000])
    store.taken("objects")
    second = await open_publisher(store, lineage="one", anchor_share=99.0)
    await second.publish_snapshot(version=1, step=1, tensors=large(1))
    again = store.taken("objects")
    assert [key for key in again if key in stored] == [half]
    assert (await load_head(store, await read_head(store))).tensors["w"].data.tobytes() == large(1)["w"].data.tobytes()


async def test_no_more_objects_are_under_way_than_allowed():
    for limit in (1, 3):
        store = CountingStore(open_store("memory://"))
        store.gathers = limit
        publisher = await open_publisher(store, lineage="one", uploads=limit)
        await publisher.publish_snapshot(version=0, step=0, tensors=large(0, mebibytes=80))
        assert store.most_under_way == limit


async def test_objects_are_neither_tiny_nor_huge():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one")
    manifest = await publisher.publish_snapshot(version=0, step=0, tensors=large(0, mebibytes=80))
    sizes: dict[str, int] = {}
    for piece in manifest.pieces:
        sizes[piece.object] = sizes.get(piece.object, 0) + piece.length
    assert sorted(sizes.values())[1] >= OBJECT_BYTES
    assert max(sizes.values()) <= 64 * MEBIBYTE


async def test_memory_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for mebibytes in (24, 72):
        publisher = await open_publisher(
            open_store(str(tmp_path / str(mebibytes))), lineage="one", encoders=2, uploads=2, skips=()
        )
        patterns = (np.random.default_rng(0).standard_normal(mebibytes << 19, np.float32).view("<u4") >> 16).astype(
            "<u2"
        )
        for version in range(2):
            patterns = patterns.copy()
            patterns[version::99] += 1
            tensors = {"w": FlatTensor(dtype="BF16", shape=(mebibytes, 1 << 19), data=patterns.view(np.uint8))}
            tracemalloc.start()
            await publisher.publish_snapshot(version=version, step=version, tensors=tensors)
            peaks.append(tracemalloc.get_traced_memory()[1] / MEBIBYTE)
            tracemalloc.stop()
    assert max(peaks) < 64 * 4
    assert max(peaks[2:]) < max(peaks[:2]) + 16


def test_groups_are_bounded_whatever_the_tensors_are():
    shapes = [(3, 5 << 20), (1, 1, 40 << 20), (7,), (), (0, 9), (1000, 3000)]
    tensors = {
        f"{index}.{dtype}": FlatTensor(
            dtype=dtype, shape=shape, data=np.zeros(int(np.prod(shape)) * (1 if dtype == "U8" else 8), np.uint8)
        )
        for index, shape in enumerate(shapes)
        for dtype in ("U8", "F64")
        if dtype == "U8" or len(shape) != 3
    }
    found = list(groups(slices(tensors), None))
    assert max(sum(one.new.size for one in group) for group in found) <= 16 * MEBIBYTE
    assert sum(one.new.size for group in found for one in group) == sum(flat.data.size for flat in tensors.values())


async def test_a_full_copy_is_added_by_bytes_and_readers_that_follow_do_not_fetch_it():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16", anchor_share=0.5, skips=())
    for version in range(40):
        manifest = await publisher.publish(version=version, step=version, tensors=weights(version))
        assert manifest.base == (version - 1 if version else None)
    routes = await routes_of(store)
    anchors = [route for route in routes if route.base is None]
    assert 3 <= len(anchors) <= 20
    for first, second in itertools.pairwise(anchors):
        between = [
            route.num_bytes
            for route in routes
            if first.version < route.version <= second.version and route.base is not None
        ]
        assert sum(between) > 0.5 * first.num_bytes
        assert sum(between[:-1]) <= 0.5 * first.num_bytes
    assert [route.version for route in routes if route.base is not None] == list(range(1, 40))
    assert (await read_head(store)).anchor == anchors[-1].version


async def test_readers_that_are_behind_skip():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16", anchor_share=1e9, skips=(4, 16))
    digests = [
        (await publisher.publish(version=version, step=version, tensors=weights(version))).digest
        for version in range(3, 41)
    ]
    skips = [(route.base, route.version) for route in await routes_of(store) if route.version - (route.base or 0) > 1]
    assert [(b, v) for b, v in skips if b is not None] == [
        (4, 8), (8, 12), (12, 16), (16, 20), (20, 24), (24, 28), (28, 32), (16, 32), (32, 36), (36, 40)
    ]  # fmt: skip
    manifests = {
        (route.base, route.version): await read_manifest(store, "one", route) for route in await routes_of(store)
    }
    assert manifests[16, 32].base_digest == digests[16 - 3]
    assert manifests[16, 32].digest == manifests[31, 32].digest == digests[32 - 3]
    reader = Follower(store, clock=ManualClock())
    staged = await reader.poll()
    assert staged.digest == digests[-1]


async def test_what_a_restart_interrupts_of_skips_is_left_out_and_begins_again():
    store = open_store("memory://")
    for first in (0, 6):
        publisher = await open_publisher(store, lineage="one", dtype="bfloat16", anchor_share=1e9, skips=(4,))
        for version in range(first, first + 6):
            await publisher.publish(version=version, step=version, tensors=weights(version))
    wide = [(route.base, route.version) for route in await routes_of(store) if route.base == route.version - 4]
    assert wide == [(0, 4)]
    for version in range(12, 17):
        await publisher.publish(version=version, step=version, tensors=weights(version))
    wide = [(route.base, route.version) for route in await routes_of(store) if route.base == route.version - 4]
    assert wide == [(0, 4), (8, 12), (12, 16)]


async def test_what_was_left_out_by_an_error_after_the_head_moved_is_added_when_the_call_is_repeated():
    store = CountingStore(open_store("memory://"))
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16", anchor_share=0.01, skips=())
    await publisher.publish(version=0, step=0, tensors=weights(0))
    before = await store.get(HEAD_KEY)
    moved = []

    class OnceMoved(CountingStore):
        async def compare_and_swap(self, key, data, *, expected):
            if moved:
                raise StoreError("no answer")
            moved.append(key)
            return await self._inner.compare_and_swap(key, data, expected=expected)

    failing = OnceMoved(store._inner)
    publisher._committer._claim._store = failing
    with pytest.raises(StoreError, match="no answer"):
        await publisher.publish(version=1, step=1, tensors=weights(1))
    assert await store.get(HEAD_KEY) != before
    assert [(route.base, route.version) for route in await routes_of(store)] == [(None, 0), (0, 1)]
    moved.clear()
    failing.compare_and_swap = store.compare_and_swap
    await publisher.publish(version=1, step=1, tensors=weights(1))
    assert [(route.base, route.version) for route in await routes_of(store)] == [(None, 0), (0, 1), (None, 1)]


async def test_the_published_state_moves_on_only_with_the_head():
    store = CountingStore(open_store("memory://"))
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    await publisher.publish(version=0, step=0, tensors=weights(0))
    store.broken = "/head"
    with pytest.raises(StoreError):
        await publisher.publish(version=1, step=1, tensors=weights(9))
    store.broken = ""
    manifest = await publisher.publish(version=1, step=1, tensors=weights(1))
    assert (manifest.base, manifest.base_digest) == (0, (await load_version(store, lineage="one", version=0)).digest)
    staged = await Follower(store, clock=ManualClock()).poll()
    assert torch.equal(staged.tensors["w"], weights(1)["w"])


async def test_a_damaged_chain_is_gone_on_from_in_a_new_lineage():
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    await publisher.publish(version=0, step=0, tensors=weights(0))
    for key in await store.list("weights/one"):
        await store.put(key, b"damaged")
    resumed = await open_publisher(store, lineage="one", dtype="bfloat16")
    with pytest.raises(IntegrityError):
        await resumed.publish(version=1, step=1, tensors=weights(1))
    fresh = await open_publisher(store, lineage=new_lineage(resumed.head), dtype="bfloat16")
    await fresh.publish(version=1, step=1, tensors=weights(1))
    staged = await Follower(store, clock=ManualClock()).poll()
    assert torch.equal(staged.tensors["w"], weights(1)["w"])


async def test_a_manifest_says_what_the_head_named_before():
    store = open_store("memory://")
    names = []
    for lineage in ("one", "two"):
        publisher = await open_publisher(store, lineage=lineage, dtype="bfloat16", anchor_share=0.01)
        for version in range(2):
            manifest = await publisher.publish(version=version, step=version, tensors=weights(version))
            names.append((manifest.lineage, manifest.version, manifest.digest))
            parent = manifest.parent
            if len(names) > 1:
                assert (parent.lineage, parent.version, parent.digest) == names[-2]
            else:
                assert parent is None
    assert manifest.epoch == 2
    for route in await routes_of(store):
        manifest = await read_manifest(store, "two", route)
        parent = manifest.parent
        assert (parent.lineage, parent.version, parent.digest) == names[1 + route.version]


async def test_a_disk_without_room_for_older_versions_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    publisher = await open_publisher(open_store("memory://"), lineage="one", dtype="bfloat16")
    with pytest.raises(HostError, match=r"TMPDIR .* weights\.skips = \[\]"):
        await publisher.publish(version=0, step=0, tensors=weights(0))


def test_publishing_in_the_background_tells_how_long_the_trainer_waited():
    store = open_store("memory://")
    background = BackgroundPublisher(asyncio.run(open_publisher(store, lineage="one", dtype="bfloat16")))
    first = background.start(version=0, step=0, tensors=weights(0))
    assert first.keys() == {"weights/publish_wait_s", "weights/copy_s"}
    second = background.start(version=1, step=1, tensors=weights(1))
    background.close()
    assert second["weights/publish_s"] > 0
    assert 0 <= second["weights/publish_wait_s"] <= second["weights/publish_s"]
    assert second["weights/bytes"] < 2 * 60 * 200
    assert flatten(weights(0)["w"]).data.size == 2 * 60 * 200
