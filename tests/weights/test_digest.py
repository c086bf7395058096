# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.policy.digest import held_digest
from etude.policy.sum_hash import Sums, from_hex, sums_of, sums_of_changed_runs, sums_of_runs
from etude.weight_types import Box, TensorEntry
from etude.weights.boxes import part
from etude.weights.digest import box_sums, tensor_digest, version_digest
from etude.weights.tensors import flatten
from etude.weights.ulp import LAYOUTS

MASK = (1 << 64) - 1


def mixed(place: int, unit: int) -> tuple[int, int]:
    """The two numbers of a unit, from the formulas alone."""
    shared = ((place << 16 | unit) + 0x9E3779B97F4A7C15) & MASK
    shared = ((shared ^ shared >> 30) * 0xBF58476D1CE4E5B9) & MASK
    first = ((shared ^ shared >> 27) * 0x94D049BB133111EB) & MASK
    second = ((shared ^ shared >> 33) * 0xC4CEB9FE1A85EC53) & MASK
    return first ^ first >> 31, second ^ second >> 29


def digest_of(data: bytes, width: int) -> str:
    unit = min(width, 2)
    numbers = [
        mixed(place, int.from_bytes(data[place * unit : place * unit + unit], "little"))
        for place in range(len(data) // unit)
    ]
    return "".join(f"{sum(lane) & MASK:016x}" for lane in zip(*numbers, strict=True)) if numbers else "0" * 32


@pytest.mark.parametrize(("place", "unit", "first"), [(5, 0x3F80, "79a1fc56d7c09ef5"), (0, 0, "e220a8397b1dcdaf")])
def test_the_first_number_of_a_unit_is_that_of_splitmix64(place, unit, first):
    sums = sums_of(np.array([unit], "<u2").view(np.uint8), width=2, begin=place)
    assert sums.hex()[:16] == first == f"{mixed(place, unit)[0]:016x}"


def test_digests_stay_what_they_are():
    data = np.arange(256, dtype=np.uint8)
    assert {dtype: tensor_digest(data, dtype) for dtype in ("BF16", "F32", "U8")} == {
        "BF16": "74961007edb3d1af167670c27410afec",
        "F32": "74961007edb3d1af167670c27410afec",
        "U8": "8fdb503592f6e3d4de36bff80cefd4cd",
    }


@given(st.sampled_from(sorted(LAYOUTS)), st.binary(max_size=600))
def test_a_digest_is_the_sum_over_all_units(dtype, data):
    width = LAYOUTS[dtype].width
    data = data[: len(data) // width * width]
    assert tensor_digest(np.frombuffer(data, np.uint8), dtype) == digest_of(data, width)


@st.composite
def grids(draw):
    """A tensor and a grid of cuts along its axes: ranks, experts, columns."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(itertools.pairwise(cuts)) for cuts in edges]
    boxes = [
        Box(0, tuple(begin for begin, _ in chosen), tuple(end - begin for begin, end in chosen))
        for chosen in itertools.product(*spans)
    ]
    dtype = draw(st.sampled_from(["BF16", "F32", "U8", "F64"]))
    size = int(np.prod(shape)) * LAYOUTS[dtype].width
    old, new = (np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8) for _ in range(2))
    same = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8) > 100
    return shape, boxes, dtype, old, np.where(same, old, new)


@given(grids())
def test_the_digest_does_not_depend_on_how_a_tensor_is_divided(found):
    shape, boxes, dtype, old, new = found
    total = changed = Sums()
    for box in boxes:
        total = total.plus(box_sums(part(old, shape, box), dtype=dtype, shape=shape, box=box))
        changed = changed.plus(box_sums(part(new, shape, box), dtype=dtype, shape=shape, box=box)).minus(
            box_sums(part(old, shape, box), dtype=dtype, shape=shape, box=box)
        )
    assert total.hex() == tensor_digest(old, dtype)
    assert total.plus(changed).hex() == tensor_digest(new, dtype)
    assert from_hex(total.hex()) == total


@given(grids(), st.integers(0, 1 << 33), st.integers(1, 5))
def test_a_digest_follows_changes_at_the_cost_of_the_changes(found, begin, run):
    _, _, dtype, old, new = found
    width = LAYOUTS[dtype].width
    run = min(run, old.size // width)
    kept = old.size // width // run * run * width
    old, new = old[:kept], new[:kept]
    begins = np.arange(begin, begin + 7 * (kept // width // run), 7, dtype=np.uint64)
    where = {"width": width, "begins": begins, "run": run}
    change = sums_of_changed_runs(old, new, **where)
    assert sums_of_runs(old, **where).plus(change) == sums_of_runs(new, **where)
    assert sums_of_changed_runs(new, old, **where).plus(change) == Sums()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_large_tensors_are_hashed_by_compiled_loops_to_the_same_sums(width):
    pytest.importorskip("numba", reason="numba, an extra, is not installed")
    data = np.random.default_rng(0).integers(0, 256, 3 * (1 << 21), dtype=np.uint8)
    begins = np.array([3, 70_000_000, 1 << 40], np.uint64)
    run = (1 << 21) // width
    small = (
        sums_of(data[at : at + 8192], width=width, begin=int(begins[at >> 21]) + at % (1 << 21) // width)
        for at in range(0, data.size, 8192)
    )
    assert sums_of_runs(data, width=width, begins=begins, run=run) == functools.reduce(Sums.plus, small)


@pytest.mark.parametrize("how", ["swapped", "moved", "both zeros", "one bit"])
def test_what_a_plain_sum_would_miss_changes_both_numbers(how):
    old = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.bfloat16)
    new = {
        "swapped": torch.tensor([2.0, 1.0, 0.0, 4.0]),
        "moved": torch.tensor([0.0, 1.0, 2.0, 4.0]),
        "both zeros": torch.tensor([1.0, 2.0, -0.0, 4.0]),
        "one bit": torch.tensor([1.0078125, 2.0, 0.0, 4.0]),
    }[how].bfloat16()
    first, second = (from_hex(tensor_digest(flatten(tensor).data, "BF16")) for tensor in (old, new))
    assert first.first != second.first
    assert first.second != second.second


def test_both_numbers_depend_on_every_bit_of_a_unit_and_its_place():
    for lane in range(2):
        flips = np.zeros(64)
        count = 0
        for place, unit, bit in itertools.product((0, 1, 77, 1 << 30), (0, 0x3F80, 0xFFFF), range(40)):
            other = (place, unit ^ (1 << bit)) if bit < 16 else (place ^ (1 << (bit - 16)), unit)
            difference = mixed(place, unit)[lane] ^ mixed(*other)[lane]
            flips += [difference >> at & 1 for at in range(64)]
            count += 1
        assert np.all(abs(flips / count - 0.5) < 0.12)


def test_what_an_engine_holds_is_named_as_what_was_published():
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7).bfloat16()}
    flats = {name: flatten(tensor) for name, tensor in tensors.items()}
    entries = [
        TensorEntry(name=name, dtype=flat.dtype, shape=flat.shape, digest=tensor_digest(flat.data, flat.dtype))
        for name, flat in flats.items()
    ]
    assert held_digest(tensors) == version_digest(entries) == version_digest(entries[::-1])
