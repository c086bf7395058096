# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Trainers of many ranks, each of which publishes its own part of every tensor."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError, StoreError, VersionTakenError
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weight_types import Box
from etude.weights.boxes import part
from etude.weights.commits import Committer
from etude.weights.fencing import claim
from etude.weights.follower import Follower
from etude.weights.packing import Slice
from etude.weights.publisher import open_publisher
from etude.weights.ranks import RankWriter
from etude.weights.reader import load_head, read_head
from etude.weights.sharded import LocalRanks, Rank, publish_shares
from etude.weights.skips import Skips
from etude.weights.tensors import flatten, unflatten

SHAPES = {
    "model.embed_tokens.weight": (12, 6),
    "model.layers.0.mlp.experts.down_proj": (4, 6, 5),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 5, 6),
    "model.layers.0.self_attn.q_proj.weight": (8, 6),
    "model.norm.weight": (6,),
    "model.scale": (),
    "model.unused": (0, 4),
}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    for step in range(version):
        for name, tensor in made.items():
            some = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(step * 100 + len(name))) < 0.1
            made[name] = torch.where(some, tensor * 1.01, tensor)
    return made


def cut(tensor: torch.Tensor, name: str, start, size) -> Slice:
    flat = flatten(tensor)
    data = part(flat.data, flat.shape, Box(0, start, size)) if flat.data.size else flat.data
    return Slice(name=name, dtype=flat.dtype, shape=flat.shape, start=start, size=size, data=np.ascontiguousarray(data))


def whole(tensor: torch.Tensor, name: str) -> Slice:
    return cut(tensor, name, (0,) * tensor.dim(), tuple(tensor.shape))


def along(axis: int, count: int):
    """Every tensor in `count` nearly equal parts along an axis, or on the first rank if it has no such axis."""

    def divide(tensors):
        ranks = [[] for _ in range(count)]
        for name, tensor in tensors.items():
            if tensor.dim() <= axis or tensor.shape[axis] < 2:
                ranks[0].append(whole(tensor, name))
                continue
            edges = [round(tensor.shape[axis] * rank / count) for rank in range(count + 1)]
            for rank, (begin, end) in enumerate(itertools.pairwise(edges)):
                if begin < end:
                    start = tuple(begin if place == axis else 0 for place in range(tensor.dim()))
                    size = tuple(end - begin if place == axis else kept for place, kept in enumerate(tensor.shape))
                    ranks[rank].append(cut(tensor, name, start, size))
        return ranks

    return divide


def by_tensor(count: int):
    """As a pipeline divides a model: whole tensors here and there."""

    def divide(tensors):
        ranks = [[] for _ in range(count)]
        for index, (name, tensor) in enumerate(tensors.items()):
            ranks[index % count].append(whole(tensor, name))
        return ranks

    return divide


def experts_and_columns(tensors):
    """Four ranks: experts by pairs, and each matrix by halves of its columns."""
    ranks = [[] for _ in range(4)]
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not tensor.numel():
            ranks[3].append(whole(tensor, name))
            continue
        half = tensor.shape[-1] // 2
        for rank, (first, last) in enumerate(itertools.product((0, 1), repeat=2)):
            start, size = [0] * tensor.dim(), list(tensor.shape)
            start[0], size[0] = first * (size[0] // 2), size[0] // 2
            start[-1], size[-1] = last * half, tensor.shape[-1] - half if last else half
            ranks[rank].append(cut(tensor, name, tuple(start), tuple(size)))
    return ranks


class Trainer:
    """Ranks of one process, and the committer that the first of them is."""

    def __init__(self, committer, ranks):
        self.committer, self.ranks = committer, ranks

    async def publish(self, version, slices):
        for rank, mine in zip(self.ranks, slices, strict=True):
            rank.begin(mine)
        return await publish_shares(
            self.committer, LocalRanks(self.ranks), self.ranks[0], version=version, step=version
        )


async def trainer(store, count, *, lineage="one", skips=(2,), **options) -> Trainer:
    committer = Committer(store, await claim(store), lineage=lineage, **options)
    ranks = [Rank(RankWriter(store, lineage=lineage, uploads=2), Skips(skips)) for _ in range(count)]
    return Trainer(committer, ranks)


DIVISIONS = {
    "one rank": along(0, 1),
    "rows over 2": along(0, 2),
    "rows over 5": along(0, 5),
    "columns over 3": along(1, 3),
    "inner axis over 2": along(2, 2),
    "tensors over 3": by_tensor(3),
    "experts and columns": experts_and_columns,
}


@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS.keys())
async def test_ranks_publish_the_same_version_as_a_single_one(divide):
    alone, together = open_store("memory://"), open_store("memory://")
    publisher = await open_publisher(alone, lineage="one", dtype="bfloat16", skips=(2,))
    count = len(divide(weights(0)))
    many = await trainer(together, count)
    reader = Follower(together, clock=ManualClock())
    for version in range(5):
        expected = await publisher.publish(version=version, step=version, tensors=weights(version))
        manifest = await many.publish(version, divide(weights(version)))
        assert manifest.digest == expected.digest
        assert manifest.tensors == expected.tensors
        assert manifest.base == (version - 1 if version else None)
        staged = await reader.poll()
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights(version).items())
    late = await load_head(together, await read_head(together))
    assert late.digest == expected.digest


@st.composite
def divisions(draw):
    """Each tensor cut anywhere, and each part given to any rank."""
    count = draw(st.integers(1, 4))
    cuts = []
    for name, shape in SHAPES.items():
        edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        if 0 in shape:
            cuts.append((name, (0,) * len(shape), shape, 0))
            continue
        for chosen in itertools.product(*(itertools.pairwise(found) for found in edges)):
            start, size = tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen)
            cuts.append((name, start, size, draw(st.integers(0, count - 1))))
    return count, draw(st.permutations(cuts))


@settings(max_examples=25)
@given(divisions(), divisions())
async def test_any_division_makes_the_same_version_and_may_change_when_ranks_come_or_go(before, after):
    alone, together = open_store("memory://"), open_store("memory://")
    publisher = await open_publisher(alone, lineage="one", dtype="bfloat16")
    for version, (count, cuts) in enumerate((before, before, after)):
        if version != 1:
            many = await trainer(together, count)
        slices = [[] for _ in range(count)]
        tensors = weights(version)
        for name, start, size, rank in cuts:
            slices[rank].append(cut(tensors[name], name, start, size))
        manifest = await many.publish(version, slices)
        expected = await publisher.publish(version=version, step=version, tensors=tensors)
        assert manifest.digest == expected.digest
    loaded = await load_head(together, await read_head(together))
    assert {name: unflatten(flat).tolist() for name, flat in loaded.tensors.items()} == {
        name: tensor.tolist() for name, tensor in weights(2).items()
    }


async def test_no_rank_stores_what_belongs_to_another():
    store = open_store("memory://")
    many = await trainer(store, 2, anchor_share=99.0, skips=())
    await many.publish(0, along(0, 2)(weights(0)))
    before = set(await store.list("weights/one/objects"))
    manifest = await many.publish(1, along(0, 2)(weights(1)))
    written = set(await store.list("weights/one/objects")) - before
    owners = {}
    for piece in manifest.pieces:
        for box in piece.boxes:
            rank = int(bool(box.start) and box.start[0] > 0)
            assert owners.setdefault(piece.object, rank) == rank
    assert len(owners) == 2
    assert len(written) == 3  # an object of each rank, and the page of routes


@pytest.mark.parametrize("broken", ["missing", "twice", "other shape", "other name"])
async def test_slices_that_do_not_make_up_a_version_never_become_one(broken):
    store = open_store("memory://")
    many = await trainer(store, 2)
    await many.publish(0, along(0, 2)(weights(0)))
    slices = along(0, 2)(weights(1))
    if broken == "missing":
        slices[1].pop(0)
    elif broken == "twice":
        slices[1].append(slices[0][0])
    else:
        tensor = torch.zeros(3, 3).bfloat16()
        slices[1][0] = whole(tensor, slices[1][0].name if broken == "other shape" else "../up")
    before = await read_head(store)
    with pytest.raises(IntegrityError):
        await many.publish(1, slices)
    assert await read_head(store) == before
    await many.publish(1, along(0, 2)(weights(1)))
    assert (await load_head(store, await read_head(store))).version == 1


async def test_a_version_that_ranks_published_is_not_made_again_with_other_bytes():
    store = open_store("memory://")
    many = await trainer(store, 3)
    divide = along(0, 3)
    first = await many.publish(4, divide(weights(1)))
    assert await many.publish(4, divide(weights(1))) == first
    with pytest.raises(VersionTakenError, match="other bytes"):
        await many.publish(4, divide(weights(2)))
    with pytest.raises(VersionTakenError, match="older"):
        await many.publish(3, divide(weights(2)))
    again = await trainer(store, 2)
    manifest = await again.publish(4, along(1, 2)(weights(1)))
    assert manifest.digest == first.digest


@pytest.mark.parametrize("seed", range(4))
async def test_ranks_get_through_a_store_that_keeps_failing(seed):
    inner = open_store("memory://")
    faults = Faults(fail=0.08, lost_reply=0.08, lost_swap=0.1, torn_write=0.05)
    store = FaultyStore(inner, clock=ManualClock(), faults=Faults(), seed=seed)
    many = await trainer(store, 4)
    store.faults = faults
    reader = Follower(inner, clock=ManualClock(), attempts=1)
    for version in range(6):
        for _ in range(200):
            try:
                await many.publish(version, experts_and_columns(weights(version)))
                break
            except StoreError:
                continue
        staged = await reader.poll()
        assert staged.version == version
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights(version).items())
