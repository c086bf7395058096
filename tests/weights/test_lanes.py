"""Wide instructions answer as the functions that they stand in for."""

# pyright: basic

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.weights.lanes import LANES, at_most_lanes, bit_lanes, count_ones, differing_lanes, first_one, nth_one

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
    lanes = (bit_lanes, at_most_lanes, differing_lanes, count_ones, first_one, nth_one)
    return {function: call(function) for function in lanes} | {"plain": plain}


@given(st.binary(min_size=3 * LANES, max_size=3 * LANES), st.integers(0, 2 * LANES), st.integers(0, 7))
def test_bytes_with_a_bit_have_their_bits_set(compiled, data, begin, place):
    values, bit = np.frombuffer(data, np.uint8), np.uint8(1 << place)
    expected = sum((int(values[begin + lane]) >> place & 1) << lane for lane in range(LANES))
    assert compiled[bit_lanes](values, begin, bit) == expected
    assert bit_lanes(values, begin, bit) == expected


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


@given(words, st.data())
def test_ones_are_counted_and_found(compiled, bits, data):
    places = [place for place in range(64) if int(bits) >> place & 1]
    which = data.draw(st.integers(0, len(places) - 1))
    assert compiled[count_ones](bits) == count_ones(bits) == len(places)
    assert compiled[first_one](bits) == first_one(bits) == places[0]
    assert compiled[nth_one](bits, which) == compiled["plain"](bits, which) == nth_one(bits, which) == places[which]
