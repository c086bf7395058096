# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Chains that are followed on a device, or written on one. Without CUDA the device is the CPU."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from etude.errors import HostError, IntegrityError
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weight_types import Piece, TensorEntry, VersionName
from etude.weights.boxes import whole
from etude.weights.chain import WEIGHTS
from etude.weights.codec import DIFFERENCES, EXP_CTX, encode
from etude.weights.commits import Committer
from etude.weights.decoding import Staging, objects_of
from etude.weights.digest import object_name, tensor_digest
from etude.weights.directory import WeightsDirectory
from etude.weights.fencing import claim
from etude.weights.follow_directory import DirectoryFollower
from etude.weights.follower import Follower, PathFollower
from etude.weights.inspection import inspect
from etude.weights.memory import HOST, DeviceMemory, memory_of
from etude.weights.packing import Slice
from etude.weights.paths import find_path
from etude.weights.publisher import open_publisher
from etude.weights.ranks import RankWriter, Share, snapshot_of
from etude.weights.reader import read_head
from etude.weights.tensors import flatten
from etude.weights.torch_kernels import TorchKernels

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, of which some elements change from version to version."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(3, 40, 50, generator=generator) * 0.02
    steps = torch.zeros(3, 40, 50)
    for _ in range(version):
        steps += torch.randn(3, 40, 50, generator=generator) * 1e-5
    first, second, third = masters + steps
    return {
        "half": first.bfloat16(),
        "single": second,
        "codes": (third * 300).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(float(version)),
        "count": torch.tensor([version, 7]),
        "mask": torch.tensor([True, version % 2 == 0]),
        "empty": torch.zeros(0, 3),
    }


def bits(tensor):
    return flatten(tensor).data.tobytes()


def same(found, expected):
    return found.keys() == expected.keys() and all(bits(found[name]) == bits(expected[name]) for name in expected)


def follower(store, device):
    return Follower(store, clock=ManualClock(), memory=DeviceMemory(torch.device(device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("difference", DIFFERENCES)
async def test_a_follower_on_a_device_has_the_versions_that_one_on_the_host_has(device, difference):
    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="one", difference=difference, skips=(3,))
    readers = [Follower(store, clock=ManualClock()), follower(store, device)]
    before = None
    for version in [*range(5), 8, 9, 17]:
        await publisher.publish(version=version, step=version, tensors=weights(version))
        here, there = [await reader.poll() for reader in readers]
        assert (here.version, here.digest) == (there.version, there.digest)
        assert {tensor.device.type for tensor in there.tensors.values()} == {device}
        assert same(there.tensors, here.tensors)
        if before is not None:
            assert same(before[0], before[1])  # what was staged first is not written to
        before = there.tensors, {name: tensor.clone() for name, tensor in there.tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
async def test_boxes_that_are_no_rows_of_their_tensor_are_put_in_place_on_a_device(device):
    store = open_store("memory://")
    committer = Committer(store, await claim(store), lineage="one")
    writers = [RankWriter(store, lineage="one", difference=EXP_CTX) for _ in range(2)]
    older, name = [None, None], None
    reader = follower(store, device)
    for version in range(3):
        every = weights(version)["half"]
        parts = [every[:, :20], every[:, 20:]]
        slices = [
            Slice(
                name="half",
                dtype="BF16",
                shape=(40, 50),
                start=(0, 20 * rank),
                size=tuple(part.shape),
                data=flatten(part).data,
            )
            for rank, part in enumerate(parts)
        ]
        shares = [await writer.write([new], old) for writer, new, old in zip(writers, slices, older, strict=True)]
        manifest = await committer.commit(shares, version=version, step=version, base=name)
        older = [snapshot_of([new], share) for new, share in zip(slices, shares, strict=True)]
        name = VersionName(lineage="one", version=version, digest=manifest.digest)
        assert bits((await reader.poll()).tensors["half"]) == bits(every)


class DeviceWriter:
    """Publishes what was encoded on a device, tensor by tensor."""

    def __init__(self, store, committer, device) -> None:
        self.store, self.committer, self.device = store, committer, device
        self.older: dict[str, torch.Tensor] | None = None
        self.base: VersionName | None = None

    async def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        entries, pieces, total = [], [], 0
        for index, (name, tensor) in enumerate(sorted(tensors.items())):
            flat = flatten(tensor)
            digest = tensor_digest(flat.data, flat.dtype)
            entries.append(TensorEntry(name=name, dtype=flat.dtype, shape=flat.shape, digest=digest))
            if not flat.data.size:
                continue
            old = None if self.older is None else torch.tensor(flatten(self.older[name]).data, device=self.device)
            new = torch.tensor(flat.data, device=self.device)
            encoding, packed = encode(new, old, dtype=flat.dtype, difference=EXP_CTX, kernels=TorchKernels(0))
            data = bytes(packed)
            await self.store.put(WEIGHTS.object("one", object_name(data)), data)
            boxes = (whole(index, flat.shape),)
            pieces.append(Piece(object=object_name(data), offset=0, length=len(data), encoding=encoding, boxes=boxes))
            total += len(data)
        share = Share(tensors=tuple(entries), pieces=tuple(pieces), num_bytes=total)
        manifest = await self.committer.commit([share], version=version, step=version, base=self.base)
        self.older, self.base = tensors, VersionName(lineage="one", version=version, digest=manifest.digest)


async def device_writer(store, device):
    return DeviceWriter(store, Committer(store, await claim(store), lineage="one"), device)


@pytest.mark.parametrize("device", DEVICES)
async def test_what_a_device_wrote_is_read_everywhere(device, tmp_path):
    store = open_store("memory://")
    writer = await device_writer(store, device)
    readers = [Follower(store, clock=ManualClock()), follower(store, device)]
    directory = WeightsDirectory(tmp_path)
    on_disk = DirectoryFollower(directory, paths=PathFollower(store, clock=ManualClock()))
    for version in range(4):
        await writer.publish(version, weights(version))
        for reader in readers:
            assert same((await reader.poll()).tensors, weights(version))
        assert (await on_disk.poll()).version == version
        assert same(load_file(tmp_path / "model.safetensors"), weights(version))
    directory.close()
    report = await inspect(store)
    assert (report.problems, report.routes) == ((), 4)


async def test_a_directory_that_was_damaged_is_noticed_without_hashes_of_tiles(tmp_path):
    store = open_store("memory://")
    writer = await device_writer(store, "cpu")
    await writer.publish(0, weights(0))
    directory = WeightsDirectory(tmp_path)
    on_disk = DirectoryFollower(directory, paths=PathFollower(store, clock=ManualClock()))
    await on_disk.poll()
    await writer.publish(1, weights(1))
    old, new = (flatten(weights(version)["half"]).data.view(np.uint16) for version in (0, 1))
    unchanged = int(np.flatnonzero(old == new)[0])
    place = directory.places["half"]
    with (tmp_path / place.file).open("r+b") as file:
        file.seek(place.at + 2 * unchanged)
        file.write(b"\xff\xff")
    assert (await on_disk.poll()).version == 1
    directory.close()
    assert same(load_file(tmp_path / "model.safetensors"), weights(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_device", [False, True])
async def test_a_wrong_base_is_refused_by_the_digest_and_stays_as_it_is(device, by_device):
    store = open_store("memory://")
    if by_device:
        writer = await device_writer(store, device)
        for version in range(2):
            await writer.publish(version, weights(version))
    else:
        publisher = await open_publisher(store, lineage="one", difference=EXP_CTX)
        for version in range(2):
            await publisher.publish(version=version, step=version, tensors=weights(version))
    path = await find_path(store, await read_head(store), held=None, max_bytes=1 << 30)
    memory = DeviceMemory(torch.device(device))
    staging = Staging({}, memory=memory)
    first, second = path.manifests

    async def advance(staging, manifest):
        staging.begin(manifest)
        for name in objects_of(manifest):
            staging.add(manifest, name, await store.get(WEIGHTS.object("one", name)))
        staging.end(manifest)
        return staging.result()

    base = await advance(staging, first)
    base["half"].data[11] ^= 1
    damaged = {name: flat.data.clone() for name, flat in base.items()}
    with pytest.raises(IntegrityError, match="half"):
        await advance(Staging(base, memory=memory), second)
    assert all(torch.equal(base[name].data, data) for name, data in damaged.items())


def test_weights_lie_where_the_engine_computes():
    assert memory_of("cpu") is HOST
    with pytest.raises(HostError, match="there is no device cuda:99"):
        memory_of("cuda:99")
