"""Wide instructions answer as the functions that they stand in for."""

# pyright: basic

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.weights.lanes import (
    LANES,
    add_up_lanes,
    at_most_lanes,
    bits_from,
    class_lanes,
    count_ones,
    differing_lanes,
    first_one,
    nth_one,
)
from etude.weights.ulp import LAYOUTS

numba = pytest.importorskip("numba", reason="the extra `numba` is not installed")
words = st.integers(1, 2**64 - 1).map(np.uint64)


@pytest.fixture(scope="module")
def compiled():
    from etude.weights.instructions import teach_lanes  # noqa: PLC0415 - needs numba

    teach_lanes()

    def call(function):
        names = ", ".join(inspect.signature(inspect.unwrap(function)).parameters)
        scope = {"function": function}
        exec(f"def outer({names}):\n    return function({names})", scope)
        return numba.njit(scope["outer"])

    plain = numba.njit(inspect.unwrap(nth_one))
    lanes = (class_lanes, add_up_lanes, at_most_lanes, bits_from, differing_lanes, count_ones, first_one, nth_one)
    return {function: call(function) for function in lanes} | {"plain": plain}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"])
@given(st.data())
def test_bits_of_classes_are_those_of_exponents_between_the_first_and_the_last(compiled, dtype, data):
    layout = LAYOUTS[dtype]
    values = np.frombuffer(
        data.draw(st.binary(min_size=192 * layout.width, max_size=192 * layout.width)), layout.unsigned
    )
    begin = data.draw(st.integers(0, 2 * LANES))
    lowest = data.draw(st.integers(-13, (1 << layout.exponent_bits) - 14))
    highest = data.draw(st.integers(max(-lowest, 0), 13))
    place, element, raised = layout.mantissa_bits + 1, values.dtype.type, max(-lowest, 0)
    numbers = [max(lowest, 0) << place, highest - raised << place, raised << place]
    lower, most, up = map(element, numbers)
    arguments = values, begin, lower, most, up, np.uint8(1 << place % 8)
    classes = [
        min(max((int(value) >> layout.mantissa_bits) % (1 << layout.exponent_bits) - lowest, raised), highest)
        for value in values[begin : begin + LANES]
    ]
    expected = tuple(sum((number >> bit & 1) << lane for lane, number in enumerate(classes)) for bit in range(4))
    assert class_lanes(*arguments) == expected
    assert compiled[class_lanes](*arguments) == expected


@given(st.lists(st.integers(0, 2**16 - 1), min_size=192, max_size=192), st.integers(0, 2 * LANES), st.integers(0, 99))
def test_numbers_are_added_up_where_they_stand(compiled, numbers, begin, first):
    sums = [first, *numbers[begin : begin + LANES]]
    expected = [*numbers[:begin], *(sum(sums[: end + 1]) % 2**16 for end in range(LANES)), *numbers[begin + LANES :]]
    for function in (compiled[add_up_lanes], add_up_lanes):
        values = np.array(numbers, np.uint16)
        assert function(values, begin, np.uint16(first)) == sum(sums) % 2**16
        assert values.tolist() == expected


@given(st.binary(min_size=6 * LANES, max_size=6 * LANES), st.integers(0, 2 * LANES), st.integers(0, 2**16 - 1))
def test_numbers_up_to_one_have_their_bits_set(compiled, data, begin, most):
    values = np.frombuffer(data, np.uint16)
    expected = sum(int(values[begin + lane] <= most) << lane for lane in range(LANES))
    assert compiled[at_most_lanes](values, begin, np.uint16(most)) == expected
    assert at_most_lanes(values, begin, np.uint16(most)) == expected


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
@given(st.sets(st.integers(0, 3 * LANES - 1)), st.integers(0, 2 * LANES), st.integers(0, 2**32))
def test_elements_that_differ_have_their_bits_set(compiled, kind, changed, begin, seed):
    old = np.random.default_rng(seed).integers(0, 256, 3 * LANES).astype(kind)
    new = old.copy()
    new[sorted(changed)] += kind(1)
    expected = sum((begin + lane in changed) << lane for lane in range(LANES))
    assert compiled[differing_lanes](old, new, begin) == expected
    assert differing_lanes(old, new, begin) == expected


@given(st.binary(min_size=16, max_size=16), st.integers(0, 8))
def test_bits_of_bytes_are_in_the_order_in_which_they_are_written(compiled, data, begin):
    bits = np.unpackbits(np.frombuffer(data, np.uint8))[8 * begin : 8 * begin + 64]
    expected = sum(int(bit) << place for place, bit in enumerate(bits))
    assert compiled[bits_from](np.frombuffer(data, np.uint8), begin) == expected
    assert bits_from(np.frombuffer(data, np.uint8), begin) == expected


@given(words, st.data())
def test_ones_are_counted_and_found(compiled, bits, data):
    places = [place for place in range(64) if int(bits) >> place & 1]
    which = data.draw(st.integers(0, len(places) - 1))
    assert compiled[count_ones](bits) == count_ones(bits) == len(places)
    assert compiled[first_one](bits) == first_one(bits) == places[0]
    assert compiled[nth_one](bits, which) == compiled["plain"](bits, which) == nth_one(bits, which) == places[which]
