# pyright: basic
import importlib.util
import random

import numpy as np
import pytest
import torch
import zstandard
from change_kit import changes
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.weights.codec import DIFFERENCES, EXP_CTX, PLANE_ZSTD, RAW, RICE_ULP, decode, encode
from etude.weights.compiled import NumbaKernels
from etude.weights.kernels import NumpyKernels
from etude.weights.tensors import DTYPES, FlatTensor, flatten, snapshot, unflatten
from etude.weights.ulp import LAYOUTS

KERNELS = [
    pytest.param(NumpyKernels(), id="numpy"),
    pytest.param(
        NumbaKernels(),
        id="numba",
        marks=pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba, an extra, is not installed"),
    ),
]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def flat_tensors(draw):
    """Any bit pattern of any dtype: NaN payloads, infinities, negative zero."""
    dtype = draw(st.sampled_from(sorted(set(DTYPES) - {"F4"})))
    shape = draw(SHAPES)
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return FlatTensor(dtype=dtype, shape=shape, data=np.frombuffer(bytearray(data), np.uint8))


def decoded(encoding, packed, old, size, dtype, kernels=None):
    weights = np.zeros(size, np.uint8) if old is None else old.copy()
    decode(encoding, memoryview(bytes(packed)), weights=weights, dtype=dtype, place="object x", kernels=kernels)
    return weights


@pytest.mark.parametrize("kernels", KERNELS)
@given(change=changes(), difference=st.sampled_from(DIFFERENCES), alone=st.booleans())
@settings(max_examples=80)
def test_a_difference_applied_to_its_base_gives_the_new_bytes(kernels, change, difference, alone):
    dtype, old, new = change
    base = None if alone else old
    encoding, packed = encode(new, base, dtype=dtype, difference=difference, kernels=kernels)
    assert len(packed) <= new.size
    assert decoded(encoding, packed, base, new.size, dtype, kernels).tobytes() == new.tobytes()


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba, an extra, is not installed")
@given(change=changes(), difference=st.sampled_from(DIFFERENCES))
@settings(max_examples=80)
def test_compiled_loops_write_the_same_bytes(change, difference):
    dtype, old, new = change
    written = {
        bytes(encode(new, old, dtype=dtype, difference=difference, kernels=kernels)[1])
        for kernels in (NumpyKernels(), NumbaKernels())
    }
    assert len(written) == 1


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_every_step_between_two_bf16_patterns_is_exact(difference):
    old = np.arange(1 << 16, dtype=np.uint16)
    for new in (old[::-1], np.roll(old, 1), old ^ 0x8000, np.where(old % 50, old, 0x7FC1).astype(np.uint16)):
        new = np.ascontiguousarray(new).view(np.uint8)
        encoding, packed = encode(new, old.view(np.uint8), dtype="BF16", difference=difference)
        assert decoded(encoding, packed, old.view(np.uint8), new.size, "BF16").tobytes() == new.tobytes()


@given(change=changes(), difference=st.sampled_from(DIFFERENCES), seed=st.integers(0, 2**32))
def test_any_flipped_bit_or_truncation_is_refused_before_a_weight_is_touched(change, difference, seed):
    dtype, old, new = change
    encoding, packed = encode(new, old, dtype=dtype, difference=difference)
    if encoding == RAW:
        return  # the hash of its object, and that of the tensor, are all it has
    rng = random.Random(seed)
    for _ in range(20):
        damaged = bytearray(packed)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        elif rng.random() < 0.2:
            damaged.append(rng.randrange(256))
        else:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        weights = old.copy()
        with pytest.raises(IntegrityError, match="object x is refused"):
            decode(encoding, memoryview(damaged), weights=weights, dtype=dtype, place="object x")
        assert weights.tobytes() == old.tobytes()


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_refused_by_weights_that_it_was_not_made_for(difference):
    weights = flatten((torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)).data
    new = weights.copy()
    new.view(np.uint16)[::50] += 1
    encoding, packed = encode(new, weights, dtype="BF16", difference=difference)
    other = weights.copy()
    other.view(np.uint16)[7] ^= 0x0400
    with pytest.raises(IntegrityError, match="cannot be applied"):
        decoded(encoding, packed, other, new.size, "BF16")


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("dtype", sorted(LAYOUTS))
def test_noise_where_there_was_other_noise_takes_no_more_than_its_own_bytes(dtype, difference):
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 256, 1 << 17, dtype=np.uint8) for _ in range(2))
    encoding, packed = encode(new, old, dtype=dtype, difference=difference)
    assert encoding == RAW
    assert len(packed) == new.size


def test_several_workers_write_the_same_bytes_and_read_them():
    generator = torch.Generator().manual_seed(0)
    weights = flatten((torch.randn(3_000_000, generator=generator) * 0.02).to(torch.bfloat16)).data
    new = weights.copy()
    new.view(np.uint16)[:: 1 << 3] += 1
    one, four = (encode(new, weights, dtype="BF16", difference=EXP_CTX, workers=workers) for workers in (1, 4))
    assert one == four
    out = weights.copy()
    decode(one[0], memoryview(one[1]), weights=out, dtype="BF16", place="object x", workers=4)
    assert out.tobytes() == new.tobytes()


@given(flat_tensors())
def test_a_tensor_survives_being_bytes(flat):
    back = flatten(unflatten(flat))
    assert (back.dtype, back.shape, back.data.tobytes()) == (flat.dtype, flat.shape, flat.data.tobytes())


def test_packed_four_bit_codes_survive_being_bytes():
    codes = np.arange(256, dtype=np.uint8)
    flat = FlatTensor(dtype="F4", shape=(2, 128), data=codes)
    assert flatten(unflatten(flat)).data.tobytes() == codes.tobytes()


def test_a_transposed_tensor_is_stored_in_the_order_of_its_shape():
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert torch.equal(unflatten(flatten(tensor)), tensor)


def test_a_snapshot_does_not_follow_its_tensor_and_has_the_published_dtype():
    tensors = {"w": torch.tensor([1.0, 1.00390625]), "count": torch.tensor(3)}
    copies = snapshot(tensors, dtype=torch.bfloat16)
    tensors["w"].zero_()
    tensors["count"].zero_()
    assert list(copies) == ["count", "w"]
    assert unflatten(copies["w"]).tolist() == [1.0, 1.0]
    assert copies["w"].dtype == "BF16"
    assert unflatten(copies["count"]).item() == 3


def stepped(dtype, *, rate, share=1.0):
    """Weights before and after an optimizer step."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1 << 18, generator=generator, dtype=torch.float64) * 0.02
    step = rate * torch.randn(1 << 18, generator=generator, dtype=torch.float64)
    step *= torch.rand(1 << 18, generator=generator, dtype=torch.float64) < share
    return (flatten(tensor.to(dtype)).data for tensor in (weights, weights + step))


def test_a_step_of_half_precision_weights_is_far_below_a_tenth_of_them():
    old, new = stepped(torch.bfloat16, rate=2e-7)
    sizes = {kind: len(encode(new, old, dtype="BF16", difference=kind)[1]) / new.size for kind in DIFFERENCES}
    assert sizes[EXP_CTX] < 0.8 * sizes[RICE_ULP]
    assert sizes[RICE_ULP] < 0.01


def test_a_step_of_single_precision_weights_takes_a_quarter_less_than_its_compressed_xor():
    old, new = stepped(torch.float32, rate=2e-7)
    compressed = len(zstandard.compress((old ^ new).tobytes(), 1))
    for kind in DIFFERENCES:
        assert len(encode(new, old, dtype="F32", difference=kind)[1]) < 0.75 * compressed


def test_weights_that_stand_alone_lose_what_their_exponents_repeat():
    old, _ = stepped(torch.bfloat16, rate=0)
    encoding, packed = encode(old, None, dtype="BF16")
    assert encoding == PLANE_ZSTD
    assert len(packed) < 0.72 * old.size


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [(RAW, bytes(7)), (RAW, bytes(9)), ("gzip", bytes(8)), *((kind, b"") for kind in (*DIFFERENCES, PLANE_ZSTD))],
)
def test_bytes_that_do_not_fit_the_tensor_are_refused(encoding, packed):
    with pytest.raises(IntegrityError, match="object x is refused"):
        decoded(encoding, packed, np.zeros(8, np.uint8), 8, "BF16")


def test_a_tile_that_needs_the_base_is_refused_where_none_may():
    old, new = stepped(torch.bfloat16, rate=2e-7)
    encoding, packed = encode(new, old, dtype="BF16", difference=EXP_CTX)
    assert encoding == EXP_CTX
    for other in (RICE_ULP, PLANE_ZSTD):
        with pytest.raises(IntegrityError, match="does not belong here"):
            decoded(other, packed, old, new.size, "BF16")
