# pyright: basic
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.weights.codec import RAW, XOR_ZSTD, decode, encode
from etude.weights.tensors import DTYPES, FlatTensor, flatten, snapshot, unflatten

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def flat_tensors(draw):
    """Any bit pattern of any dtype: NaN payloads, infinities, negative zero."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(SHAPES)
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return FlatTensor(dtype=dtype, shape=shape, data=np.frombuffer(bytearray(data), np.uint8))


@given(flat_tensors(), st.data())
def test_a_difference_applied_to_its_base_gives_the_new_bytes(new, data):
    base = data.draw(st.none() | st.binary(min_size=new.data.size, max_size=new.data.size))
    older = None if base is None else np.frombuffer(base, np.uint8)
    encoding, packed = encode(new.data, older)
    assert len(packed) <= new.data.size
    decoded = decode(encoding, memoryview(bytes(packed)), num_bytes=new.data.size, base=older)
    assert decoded.tobytes() == new.data.tobytes()


@given(flat_tensors())
def test_a_tensor_survives_being_bytes(flat):
    back = flatten(unflatten(flat))
    assert (back.dtype, back.shape, back.data.tobytes()) == (flat.dtype, flat.shape, flat.data.tobytes())


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


def test_a_small_step_travels_in_fewer_bytes_than_the_weights():
    weights = torch.linspace(-0.1, 0.1, 10_000)
    encoding, packed = encode(flatten(weights * (1 + 1e-4)).data, flatten(weights).data)
    assert encoding == XOR_ZSTD
    assert len(packed) < 0.7 * 40_000


def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = zstandard.compress(bytes(1 << 26))
    with pytest.raises(IntegrityError, match="claims 67108864 bytes"):
        decode(XOR_ZSTD, memoryview(bomb), num_bytes=8, base=np.zeros(8, np.uint8))


@pytest.mark.parametrize(
    ("encoding", "packed", "base"),
    [
        (RAW, bytes(7), None),
        (RAW, bytes(9), None),
        (XOR_ZSTD, zstandard.compress(bytes(8)), None),
        (XOR_ZSTD, zstandard.compress(bytes(8)), np.zeros(9, np.uint8)),
        (XOR_ZSTD, zstandard.compress(bytes(8)) + b"extra", np.zeros(8, np.uint8)),
        (XOR_ZSTD, zstandard.compress(bytes(8))[:-1], np.zeros(8, np.uint8)),
        (XOR_ZSTD, b"", np.zeros(8, np.uint8)),
        (XOR_ZSTD, b"not a frame", np.zeros(8, np.uint8)),
        ("gzip", bytes(8), None),
    ],
)
def test_bytes_that_do_not_fit_the_tensor_are_refused(encoding, packed, base):
    with pytest.raises(IntegrityError):
        decode(encoding, memoryview(packed), num_bytes=8, base=base)
