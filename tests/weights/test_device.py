# pyright: basic
"""Weights on a device give the same bytes as weights here, and take the same. Without CUDA the device is the CPU."""

import random

import numpy as np
import pytest
import torch
from change_kit import changes
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.policy.device_hash import device_sums
from etude.policy.digest import held_digest
from etude.policy.sum_hash import sums_of, sums_of_runs
from etude.weights.codec import DIFFERENCES, RAW, decode, encode
from etude.weights.delta import MAX_TILE, Coding, read_tile
from etude.weights.kernels import NO_DIGEST
from etude.weights.tiles import read_tiles
from etude.weights.torch_kernels import TorchKernels
from etude.weights.ulp import LAYOUTS

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]
KERNELS = TorchKernels(0)
ALL_CODINGS = tuple(Coding)


def sent(data, device):
    return torch.tensor(data, device=device)


def tiles_of(packed, size):
    return [
        (tile.coding, tile.begin, tile.end, bytes(tile.blob), tile.digest)
        for tile in read_tiles(memoryview(bytes(packed)), size, allowed=ALL_CODINGS)
    ]


def applied(encoding, packed, weights, dtype):
    proven = decode(
        encoding, memoryview(bytes(packed)), weights=weights, dtype=dtype, place="object x", kernels=KERNELS
    )
    return weights.cpu().numpy().tobytes(), proven


@pytest.mark.parametrize("device", DEVICES)
@given(change=changes(), difference=st.sampled_from(DIFFERENCES), alone=st.booleans())
@settings(max_examples=150)
def test_what_a_host_wrote_is_applied_on_a_device(device, change, difference, alone):
    dtype, old, new = change
    encoding, packed = encode(new, None if alone else old, dtype=dtype, difference=difference)
    assert applied(encoding, packed, sent(old, device), dtype) == (new.tobytes(), True)


@pytest.mark.parametrize("device", DEVICES)
@given(change=changes(), difference=st.sampled_from(DIFFERENCES), alone=st.booleans())
@settings(max_examples=150)
def test_a_device_writes_what_a_host_writes_but_for_the_hashes_of_tiles(device, change, difference, alone):
    dtype, old, new = change
    there = sent(new, device), None if alone else sent(old, device)
    encoding, packed = encode(*there, dtype=dtype, difference=difference, kernels=KERNELS)
    expected = encode(new, None if alone else old, dtype=dtype, difference=difference)
    assert encoding == expected[0]
    if encoding == RAW:
        assert bytes(packed) == bytes(expected[1])
    else:
        size = new.size // LAYOUTS[dtype].width
        tiles = [(*tile[:-1], NO_DIGEST) for tile in tiles_of(expected[1], size)]
        assert tiles_of(packed, size) == tiles
    assert applied(encoding, packed, sent(old, device), dtype)[0] == new.tobytes()
    here = old.copy()
    decode(encoding, memoryview(bytes(packed)), weights=here, dtype=dtype, place="object x")
    assert here.tobytes() == new.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_every_step_between_two_bf16_patterns_is_exact(device, difference):
    old = np.arange(1 << 16, dtype=np.uint16)
    for new in (old[::-1], np.roll(old, 1), old ^ 0x8000, np.where(old % 50, old, 0x7FC1).astype(np.uint16)):
        there = sent(np.ascontiguousarray(new).view(np.uint8), device), sent(old.view(np.uint8), device)
        encoding, packed = encode(*there, dtype="BF16", difference=difference, kernels=KERNELS)
        assert applied(encoding, packed, there[1], "BF16")[0] == new.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_tiles_of_the_largest_size_are_those_of_a_host(device, difference):
    size = MAX_TILE + 12345
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16
    new = old + (rng.random(size, np.float32) < 0.005) * rng.integers(-1, 2, size)
    old, new = (patterns.astype(np.uint16).view(np.uint8) for patterns in (old, new))
    there = sent(new, device), sent(old, device)
    encoding, packed = encode(*there, dtype="BF16", difference=difference, kernels=TorchKernels(size))
    expected = encode(new, old, dtype="BF16", difference=difference)[1]
    assert [tile[:-1] for tile in tiles_of(packed, size)] == [tile[:-1] for tile in tiles_of(expected, size)]
    assert applied(encoding, packed, there[1], "BF16")[0] == new.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@given(change=changes(), difference=st.sampled_from(DIFFERENCES), by_device=st.booleans(), seed=st.integers(0, 2**32))
def test_any_flipped_bit_or_truncation_is_refused_before_a_weight_is_touched(
    device, change, difference, by_device, seed
):
    dtype, old, new = change
    if by_device:
        there = sent(new, device), sent(old, device)
        encoding, packed = encode(*there, dtype=dtype, difference=difference, kernels=KERNELS)
    else:
        encoding, packed = encode(new, old, dtype=dtype, difference=difference)
    if encoding == RAW:
        return  # the hash of its object, and that of the tensor, are all it has
    rng = random.Random(seed)
    weights = sent(old, device)
    for _ in range(5):
        damaged = bytearray(packed)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        else:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        with pytest.raises(IntegrityError, match="object x is refused"):
            decode(encoding, memoryview(damaged), weights=weights, dtype=dtype, place="object x", kernels=KERNELS)
        assert weights.cpu().numpy().tobytes() == old.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@given(noise=st.binary(max_size=300), coding=st.sampled_from(Coding), dtype=st.sampled_from(["BF16", "F32", "I8"]))
def test_noise_in_a_tile_is_refused_or_gives_a_patch_of_places_in_the_tile(device, noise, coding, dtype):
    layout = LAYOUTS[dtype]
    old = sent(np.random.default_rng(0).integers(0, 256, 200 * layout.width, dtype=np.uint8), device)
    tile = KERNELS.view(old.clone(), layout)
    try:
        patch = read_tile(tile, coding, memoryview(noise), layout=layout, kernels=KERNELS)
    except IntegrityError:
        assert torch.equal(tile.view(torch.uint8), old)
    else:
        patch.apply(tile, layout, KERNELS)
        assert len(tile) == 200


@pytest.mark.parametrize("device", DEVICES)
@given(dtype=st.sampled_from(sorted(LAYOUTS)), data=st.binary(max_size=600), begin=st.integers(0, 1 << 45))
def test_a_device_takes_the_digest_that_a_host_takes(device, dtype, data, begin):
    width = LAYOUTS[dtype].width
    here = np.frombuffer(data[: len(data) // width * width], np.uint8)
    assert device_sums(sent(here, device), width=width) == sums_of(here, width=width)
    assert device_sums(sent(here, device), width=width, begins=[begin]) == sums_of(here, width=width, begin=begin)


@pytest.mark.parametrize("device", DEVICES)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.lists(st.integers(0, 1 << 45), min_size=1, max_size=9),
    st.data(),
)
def test_a_digest_taken_on_a_device_does_not_depend_on_how_a_tensor_is_divided(device, width, run, begins, data):
    size = len(begins) * run * width
    here = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    expected = sums_of_runs(here, width=width, begins=np.array(begins, np.uint64), run=run)
    assert device_sums(sent(here, device), width=width, begins=begins) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_many_chunks_make_the_digest_that_a_host_takes(device, width):
    here = np.random.default_rng(0).integers(0, 256, 5 * (1 << 20) + 4 * 77, dtype=np.uint8)
    assert device_sums(sent(here, device), width=width) == sums_of(here, width=width)


@pytest.mark.parametrize("device", DEVICES)
def test_what_an_engine_on_a_device_holds_is_named_as_on_a_host(device):
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7).bfloat16(), "empty": torch.zeros(0, 3)}
    assert held_digest({name: tensor.to(device) for name, tensor in tensors.items()}) == held_digest(tensors)
