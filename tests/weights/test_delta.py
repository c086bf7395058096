# pyright: basic
import contextlib
import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.weights.bits import join, split
from etude.weights.context import CLASSES, read_changes, write_changes
from etude.weights.delta import MAX_TILE, Coding, Patch, read_tile, write_tile
from etude.weights.kernels import NumpyKernels
from etude.weights.rice import read_gaps, write_gaps
from etude.weights.tiles import apply_tiles, read_tiles, write_tiles
from etude.weights.ulp import LAYOUTS, moved, steps

KERNELS = NumpyKernels()
BF16 = LAYOUTS["BF16"]
VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "delta_codec.json").read_text())
MEBIBYTE = 1 << 20


def applied(old, coding, blob, layout=BF16):
    tile = old.copy()
    read_tile(tile, coding, memoryview(blob), layout=layout, kernels=KERNELS).apply(tile, layout, KERNELS)
    return tile


def elements(vector, which):
    return np.frombuffer(bytes.fromhex(vector[which]), LAYOUTS[vector["dtype"]].unsigned)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_golden_tile_is_read(vector):
    tile, layout, blob = elements(vector, "old").copy(), LAYOUTS[vector["dtype"]], bytes.fromhex(vector["blob"])
    if vector["coding"] == "CONTEXT":  # larger than their elements, so no object holds them
        positions, values = read_changes(tile, memoryview(blob), count=CLASSES, layout=layout, kernels=KERNELS)
        Patch(positions=positions, values=values).apply(tile, layout, KERNELS)
    else:
        tile = applied(tile, Coding[vector["coding"]], blob, layout)
    assert tile.tobytes() == elements(vector, "new").tobytes()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_golden_tile_is_written(vector):
    old, new, layout = elements(vector, "old"), elements(vector, "new"), LAYOUTS[vector["dtype"]]
    if vector["coding"] == "CONTEXT":  # too small to be chosen
        positions, _, _ = KERNELS.changed(old, new)
        distances = steps(old[positions], new[positions], layout)
        blob = write_changes(old, positions, distances, count=CLASSES, layout=layout, kernels=KERNELS)
    else:
        coding, blob = write_tile(old, new, layout=layout, kernels=KERNELS, context=False)
        assert coding.name == vector["coding"]
    assert blob.hex() == vector["blob"]


def test_gaps_are_written_as_in_the_example():
    positions = np.cumsum(np.array([0, 5, 2, 9]) + 1) - 1
    written = write_gaps(positions, KERNELS)
    assert written.hex() == "02040000000b000000942050"
    assert read_gaps(memoryview(written), 20, KERNELS).tolist() == positions.tolist()


def test_bf16_patterns_are_ordered_as_their_values_with_every_nan_outside():
    ascending = [0xFFC0, 0xFF80, 0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80, 0x7F80, 0x7FC0]
    patterns = np.array(ascending, np.uint16)
    distances = steps(np.full(len(ascending), 0xFFFF, np.uint16), patterns, BF16)
    assert distances.tolist() == [0x003F, 0x007F, 0x407F, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xBF80, 0xFF80, 0xFFC0]


@pytest.mark.parametrize("dtype", sorted(LAYOUTS))
@given(st.data())
def test_what_moved_by_the_steps_between_two_patterns_is_the_second_one(dtype, data):
    layout = LAYOUTS[dtype]
    patterns = st.lists(st.integers(0, (1 << layout.bits) - 1), min_size=3, max_size=3)
    old, new = (np.array(data.draw(patterns), layout.unsigned) for _ in range(2))
    assert moved(old, steps(old, new, layout), layout).tolist() == new.tolist()


def sample(size=4096, every=20):
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[::every] += rng.integers(1, 40, new[::every].size).astype(np.uint16)
    return old, new


@given(
    coding=st.sampled_from([Coding.RAW, Coding.PLANES, Coding.RICE, Coding.CONTEXT, Coding.DENSE, Coding.SAME]),
    noise=st.binary(max_size=300),
)
def test_noise_is_refused_or_gives_a_tile_of_the_same_size(coding, noise):
    old, _ = sample(200)
    with contextlib.suppress(IntegrityError):
        assert applied(old, coding, noise).size == old.size


@pytest.mark.parametrize("coding", [Coding.RICE, Coding.CONTEXT, Coding.DENSE, Coding.PLANES])
@given(st.data())
def test_a_tile_with_other_numbers_in_it_is_refused_or_read_as_some_tile(coding, data):
    old, new = sample()
    positions, _, _ = KERNELS.changed(old, new)
    distances = steps(old[positions], new[positions], BF16)
    count = CLASSES if coding == Coding.CONTEXT else 1
    blob = {
        Coding.RICE: lambda: write_tile(old, new, layout=BF16, kernels=KERNELS, context=False)[1],
        Coding.PLANES: lambda: join([b"\0" + bytes(old.size), b"\0" + bytes(old.size)]),
    }.get(coding, lambda: write_changes(old, positions, distances, count=count, layout=BF16, kernels=KERNELS))()
    damaged = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.sampled_from([0, 1, 2, 22, 127, 128, 255]))
    with contextlib.suppress(IntegrityError):
        assert applied(old, coding, bytes(damaged)).size == old.size


def replaced(blob, part, content, parts=5):
    pieces = [bytes(piece) for piece in split(memoryview(blob), parts)]
    pieces[part] = content
    return join(pieces)


def rice(k, count, bits, body):
    return struct.pack("<BII", k + 1, count, bits) + body


@pytest.mark.parametrize(
    "gaps",
    [
        rice(0, 2, 2, b"\xc0") + b"x",
        rice(0, 2, 2, b"\xe0"),
        rice(0, 2, 3, b"\xc0"),
        rice(0, 3, 3, b"\xa0"),
        rice(0, 2, 2**32 - 1, b"\xc0"),
        rice(0, 2**32 - 1, 2**32 - 1, b"\xc0"),
        rice(22, 2, 2, b"\xc0" + b"\xc0" * 22),
        rice(23, 2, 2, b"\xc0" + b"\0" * 23),
        rice(254, 2, 2, b"\xc0" + b"\0" * 254),
        rice(1, 2, 2, b"\xc0\xe0"),
        rice(1, 2, 2, b"\xc0"),
        rice(-1, 2, 2, b"\xc0"),
        rice(0, 0, 0, b""),
        rice(0, 2, 0, b""),
        rice(10, 2, 2, b"\xc0" + b"\xc0" * 10),
        b"",
        b"\x01",
    ],
    ids=lambda gaps: gaps[:14].hex() or "empty",
)
def test_gaps_that_no_writer_makes_are_refused(gaps):
    with pytest.raises(IntegrityError):
        read_gaps(memoryview(gaps), 1000, KERNELS)


@pytest.mark.parametrize(
    ("part", "content"),
    [
        (1, b""),
        (1, bytes(1000)),
        (2, b""),
        (3, b""),
        (3, bytes(7)),
        (3, zstandard.compress(bytes(1 << 26))),
        (3, b"\x28\xb5\x2f\xfd"),
        (4, b"\0\1\0"),
        (4, b""),
    ],
)
def test_distances_that_do_not_fit_the_changes_are_refused(part, content):
    old, new = sample()
    coding, blob = write_tile(old, new, layout=BF16, kernels=KERNELS, context=False)
    assert coding == Coding.RICE
    with pytest.raises(IntegrityError):
        applied(old, coding, replaced(blob, part, content))


@pytest.mark.parametrize(
    ("part", "content"),
    [
        (0, b""),
        (0, b"\x78" + struct.pack("<BI", 7, 0) * CLASSES),
        (0, b"\x78" + struct.pack("<BI", 3, 1) * CLASSES),
        (0, b"\x78" + struct.pack("<BI", 0, 2**32 - 1) * CLASSES),
        (0, b"\x78" + struct.pack("<BI", 1, 0) * CLASSES),
        (0, b"\x78" + struct.pack("<BI", 11, 0) * CLASSES),
        (1, b""),
        (1, bytes(4000)),
        (6, b"\0"),
        (6, b"\0" + b"\x24" * 205),
        (6, b"\0" + b"\xff" * 205),
        (7, b""),
        (7, bytes(500)),
    ],
)
def test_classes_that_do_not_fit_the_tile_are_refused(part, content):
    old, new = sample()
    positions, _, _ = KERNELS.changed(old, new)
    distances = steps(old[positions], new[positions], BF16)
    blob = write_changes(old, positions, distances, count=CLASSES, layout=BF16, kernels=KERNELS)
    with pytest.raises(IntegrityError):
        applied(old, Coding.CONTEXT, replaced(blob, part, content, parts=8))


def test_integers_have_no_exponents_to_go_by():
    with pytest.raises(IntegrityError, match="exponent"):
        applied(np.zeros(400, np.uint8), Coding.CONTEXT, bytes(20), LAYOUTS["U8"])


@pytest.mark.parametrize("tile_size", [0, MAX_TILE + 1, 1])
def test_a_table_with_tiles_of_a_size_that_no_writer_uses_is_refused(tile_size):
    old, new = sample()
    written = bytearray(write_tiles(old, new, layout=BF16, kernels=KERNELS, context=True))
    written[8:12] = struct.pack("<I", tile_size)
    with pytest.raises(IntegrityError):
        read_tiles(memoryview(written), new.size, allowed=list(Coding))


@pytest.mark.parametrize(
    ("dtype", "share", "context"),
    [("BF16", 0.09, True), ("BF16", 0.09, False), ("BF16", 1.0, True), ("F32", 0.09, False), ("F32", 1.0, True)],
)
def test_a_tile_of_any_density_takes_less_than_64_mebibytes(dtype, share, context):
    layout = LAYOUTS[dtype]
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(MAX_TILE, dtype=np.float32).view(np.uint32) >> (32 - layout.bits)).astype(
        layout.unsigned
    )
    new = old.copy()
    moved = rng.random(MAX_TILE, dtype=np.float32) < share
    new[moved] += rng.integers(1, 200, int(moved.sum())).astype(layout.unsigned)
    tracemalloc.start()
    try:
        written = write_tiles(old, new, layout=layout, kernels=KERNELS, context=context)
        assert tracemalloc.get_traced_memory()[1] - 2 * len(written) < 64 * MEBIBYTE
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        tiles = read_tiles(memoryview(written), new.size, allowed=list(Coding))
        apply_tiles(tiles, old, layout=layout, kernels=KERNELS)
        assert tracemalloc.get_traced_memory()[1] - before < 64 * MEBIBYTE
    finally:
        tracemalloc.stop()
    assert old.tobytes() == new.tobytes()
