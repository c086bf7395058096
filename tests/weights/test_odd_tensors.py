# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Tensors as trainers are reported to have them, and as they change from one version to the next."""

import resource

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from etude.errors import IntegrityError, PolicyError
from etude.policy.sum_hash import sums_of, sums_of_runs
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weight_types import Box
from etude.weights.boxes import make_up, runs, slabs
from etude.weights.directory import WeightsDirectory
from etude.weights.follow_directory import DirectoryFollower
from etude.weights.follower import Follower, PathFollower
from etude.weights.inspection import inspect
from etude.weights.publisher import open_publisher
from etude.weights.shards import find_places
from etude.weights.tensors import DTYPES, flatten


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit, NaNs too."""
    return (
        (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        and found.contiguous().reshape(-1).view(torch.uint8).equal(wanted.contiguous().reshape(-1).view(torch.uint8))
        if wanted.numel()
        else found.shape == wanted.shape
    )


class Chain:
    """A chain that is followed in memory and in a directory, version by version."""

    def __init__(self, folder, *, dtype="float32") -> None:
        self.store = open_store("memory://")
        self.folder = folder
        self.dtype = dtype
        self.memory = Follower(self.store, clock=ManualClock(), attempts=2)
        self.directory = WeightsDirectory(folder)
        self.disk = DirectoryFollower(self.directory, paths=PathFollower(self.store, clock=ManualClock(), attempts=2))
        self.publisher = None

    async def publish(self, version: int, tensors, *, wanted=None) -> None:
        self.publisher = self.publisher or await open_publisher(self.store, lineage="one", dtype=self.dtype)
        await self.publisher.publish(version=version, step=version, tensors=tensors)
        staged = await self.memory.poll()
        await self.disk.poll()
        on_disk = {}
        for path in self.folder.glob("*.safetensors"):
            on_disk |= load_file(path)
        wanted = tensors if wanted is None else wanted
        for found in (staged.tensors, on_disk):
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert same(found[name], tensor.detach()), name

    async def check(self) -> None:
        self.directory.close()
        assert not (await inspect(self.store)).problems


def patterns(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every kind of bits."""
    data = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return data.view(dtype).clone()


async def test_views_transposes_and_strides_are_published_as_what_they_show(tmp_path):
    storage = torch.arange(10_000, dtype=torch.float32)
    chain = Chain(tmp_path)
    for version in range(3):
        whole = storage.reshape(100, 100) + version
        await chain.publish(
            version,
            {
                "transposed": whole.T,
                "slice": whole[10:20, ::3],
                "offset": storage[5_000:5_010] + version,
                "expanded": whole[:1].expand(50, 100),
                "channels": whole[:, :96].reshape(2, 50, 4, 24).to(memory_format=torch.channels_last),
                "conjugate": (whole[:2] + 1j * whole[:2]).conj().imag,
                "parameter": torch.nn.Parameter(whole[:3].clone()),
            },
        )
    await chain.check()


async def test_tied_tensors_are_published_under_each_of_their_names_and_follow_together(tmp_path):
    shared = torch.nn.Parameter(torch.randn(50, 20))
    chain = Chain(tmp_path)
    for version in range(3):
        with torch.no_grad():
            shared += 1e-3
        await chain.publish(version, {"model.embed_tokens.weight": shared, "lm_head.weight": shared})
    await chain.publish(3, {"model.embed_tokens.weight": shared})  # untied, or left out, from now on
    await chain.check()


async def test_scalars_empties_integers_and_masks_follow(tmp_path):
    chain = Chain(tmp_path)
    for version in range(3):
        await chain.publish(
            version,
            {
                "scalar": torch.tensor(1.5 + version),
                "step": torch.tensor(version),
                "none": torch.zeros(0, 7),
                "none.of.many": torch.zeros(3, 0, 2, dtype=torch.int64),
                "position_ids": torch.arange(40).reshape(2, 20) + version,
                "mask": (torch.arange(30) % (version + 2)).bool(),
                "bytes": torch.arange(250, dtype=torch.uint8) + version,
                "short": torch.arange(250, dtype=torch.int16) * -version,
            },
        )
    await chain.check()


async def test_nothing_but_empty_tensors_or_one_scalar_is_a_version_too(tmp_path):
    for number, tensors in enumerate(({"none": torch.zeros(0, 3)}, {"one": torch.tensor(1.0)})):
        chain = Chain(tmp_path / str(number))
        await chain.publish(0, tensors)
        await chain.publish(1, {name: tensor + 1 for name, tensor in tensors.items()})
        await chain.publish(2, {name: tensor + 1 for name, tensor in tensors.items()})  # that did not change
        await chain.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_that_are_not_finite_arrive_bit_for_bit(tmp_path, dtype):
    chain = Chain(tmp_path, dtype=dtype)
    for version in range(3):
        await chain.publish(
            version, {"w": patterns(getattr(torch, dtype), version), "x": torch.ones(3).to(getattr(torch, dtype))}
        )
    await chain.check()


async def test_tensors_may_come_go_and_change_their_shape_or_dtype(tmp_path):
    # a vocabulary that grows, a frozen tower that is dropped, an adapter that is merged, a buffer of another type
    chain = Chain(tmp_path)
    tensors = {"embed": torch.randn(100, 8), "tower": torch.randn(30, 30), "ids": torch.arange(10)}
    await chain.publish(0, tensors)
    await chain.publish(1, tensors | {"embed": torch.cat([tensors["embed"], torch.zeros(28, 8)])})
    tensors["embed"] = torch.randn(128, 8)
    await chain.publish(2, {name: tensors[name] for name in ("embed", "ids")})
    await chain.publish(3, tensors | {"new": torch.randn(5)})
    await chain.publish(4, tensors | {"ids": torch.arange(10, dtype=torch.int32), "renamed": torch.randn(5)})
    await chain.publish(
        5, tensors | {"ids": torch.arange(10, dtype=torch.int32).reshape(2, 5), "renamed": torch.ones(5)}
    )
    await chain.check()


async def test_a_chain_goes_on_in_another_dtype(tmp_path):
    chain = Chain(tmp_path)
    tensors = {"w": torch.randn(64, 64), "ids": torch.arange(4)}
    await chain.publish(0, tensors)
    chain.publisher, chain.dtype = None, "bfloat16"
    await chain.publish(
        1, tensors, wanted={name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    )
    await chain.check()


async def test_names_that_fit_no_file_or_no_format_are_refused_with_the_name():
    publisher = await open_publisher(open_store("memory://"), lineage="one")
    for name in ("", "a b", "\u00e9", "../w", "a/../b", "/w", "a\\b", ".hidden", "x" * 600, "a\x00b", "w\n"):
        with pytest.raises(IntegrityError, match="plain one: letters"):
            await publisher.publish(version=0, step=0, tensors={name: torch.ones(2)})
    with pytest.raises(IntegrityError, match=r"__metadata__.*rename the tensor"):
        await publisher.publish(version=0, step=0, tensors={"__metadata__": torch.ones(2)})
    names = ["a..b", "_orig_mod.layers.0.w", "base_model.model.x.lora_A.default.weight", "a/b", "0"]
    assert (await publisher.publish(version=0, step=0, tensors=dict.fromkeys(names, torch.ones(2)))).version == 0


@pytest.mark.parametrize(
    ("tensor", "what"),
    [(torch.ones(2, dtype=torch.complex64), "complex64"), (torch.ones(2, device="meta"), "meta tensor")],
)
async def test_a_tensor_that_cannot_be_published_is_named(tensor, what):
    publisher = await open_publisher(open_store("memory://"), lineage="one")
    with pytest.raises(PolicyError, match=f"tensor 'model.odd' cannot be published: .*{what}"):
        await publisher.publish(version=0, step=0, tensors={"model.ok": torch.ones(1), "model.odd": tensor})


async def test_what_the_trainer_does_to_its_tensors_afterwards_does_not_show(tmp_path):
    chain = Chain(tmp_path)
    weights = torch.randn(1000)
    snapshot = weights.clone()
    publisher = await open_publisher(chain.store, lineage="one")
    flat = publisher.snapshot({"w": weights})
    weights.zero_()
    await publisher.publish_snapshot(version=0, step=0, tensors=flat)
    assert same((await chain.memory.poll()).tensors["w"], snapshot)
    await chain.publish(1, {"w": weights})
    await chain.check()


async def test_more_tensors_than_a_process_may_have_files_are_followed_in_a_directory(tmp_path):
    # a mixture of experts in files of one tensor per matrix of each expert, many of which share a tile
    chain = Chain(tmp_path)
    experts = {f"model.layers.{n // 512}.mlp.experts.{n % 512}.w.weight": torch.ones(2) * n for n in range(1500)}
    await chain.publish(0, experts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        experts["model.layers.1.mlp.experts.5.w.weight"] = torch.ones(2)
        await chain.publish(1, experts)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    chain.directory.close()


@pytest.mark.parametrize("rows", [(1 << 31) // 1000 + 7, (1 << 33) // 1000 + 7])
def test_places_beyond_32_bits_are_told_apart(rows):
    """What names elements of a tensor of billions, without its bytes."""
    shape = (rows, 1000)
    boxes = [Box(0, start, size) for start, size in slabs(shape, 1 << 22)]
    assert make_up(boxes, shape)
    assert not make_up([*boxes[:-1], boxes[-2]], shape)
    last = boxes[-1]
    begins, run = runs(last, shape)
    assert int(begins[0]) + run * begins.size == rows * 1000
    data = np.arange(16, dtype=np.uint8)
    sums = [
        sums_of_runs(data, width=2, begins=np.array([place], np.uint64), run=8)
        for place in (0, 1 << 31, 1 << 32, (1 << 32) + 8, 1 << 33)
    ]
    assert len({found.hex() for found in sums}) == len(sums)
    assert sums[0].hex() == sums_of(data, width=2).hex()


async def test_files_of_others_with_extra_metadata_and_odd_layouts_are_read_and_gone_on_with(tmp_path):
    chain = Chain(tmp_path)
    tensors = {"b": torch.randn(700), "a": torch.randn(300, 50), "c": torch.arange(9, dtype=torch.uint8)}
    await chain.publish(0, tensors)
    chain.directory.close()
    state = (tmp_path / "etude.version").read_bytes()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "made by": "another \u00e9"})
    assert set(find_places(tmp_path)) == set(tensors)
    chain.directory = WeightsDirectory(tmp_path)
    assert chain.directory.state.version == 0
    chain.disk = DirectoryFollower(chain.directory, paths=PathFollower(chain.store, clock=ManualClock()))
    await chain.publish(1, tensors | {"b": tensors["b"] + 1})
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata()["made by"] == "another \u00e9"
    assert (tmp_path / "etude.version").read_bytes() != state
    await chain.check()


@pytest.mark.parametrize(
    "name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I64", "I32", "I16", "I8", "U8"]
)
async def test_every_dtype_that_is_written_is_one_that_safetensors_reads(tmp_path, name):
    chain = Chain(tmp_path)
    publisher = await open_publisher(chain.store, lineage="one")
    for version in range(2):
        tensors = {"t": patterns(DTYPES[name], version), "odd": patterns(torch.uint8, version)[:3]}
        flat = {key: flatten(tensor) for key, tensor in tensors.items()}
        await publisher.publish_snapshot(version=version, step=version, tensors=flat)
        await chain.disk.poll()
        found = load_file(tmp_path / "model.safetensors")
        assert all(same(found[key], tensor) for key, tensor in tensors.items())
    chain.directory.close()
