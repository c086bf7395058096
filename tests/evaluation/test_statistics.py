"""Promises of the statistics."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.evaluation.statistics import (
    Tally,
    clustered_interval,
    mean_pass_at_k,
    pass_at_k,
    pass_rate,
    wilson_interval,
)

tallies = st.lists(
    st.integers(0, 8).flatmap(lambda n: st.integers(0, n).map(lambda c: Tally(passed=c, scored=n))),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.4643), (4, 0.7857), (8, 1.0)])
def test_pass_at_k_matches_the_published_values(k: int, expected: float):
    assert pass_at_k(Tally(passed=2, scored=8), k) == pytest.approx(expected, abs=1e-4)


def test_pass_at_k_is_unknown_with_too_few_attempts():
    assert math.isnan(pass_at_k(Tally(passed=1, scored=3), 4))
    assert mean_pass_at_k([Tally(passed=1, scored=3), Tally(passed=0, scored=4)], 4) == 0.0


@given(tallies)
def test_pass_at_k_never_falls_with_k(found: list[Tally]):
    for tally in found:
        rates = [pass_at_k(tally, k) for k in range(1, tally.scored + 1)]
        assert rates == sorted(rates)
        assert not rates or rates[0] == pytest.approx(tally.rate)


@given(tallies, st.integers(0, 9))
def test_the_interval_is_repeatable_and_holds_the_rate(found: list[Tally], seed: int):
    low, high = clustered_interval(found, seed=seed, resamples=200)
    assert (low, high) == clustered_interval(found, seed=seed, resamples=200)
    assert 0.0 <= low <= high <= 1.0
    if any(tally.scored for tally in found):
        assert low - 1e-9 <= pass_rate(found) <= high + 1e-9


def test_agreement_of_all_tasks_is_not_certainty():
    low, high = clustered_interval([Tally(passed=4, scored=4)] * 60, seed=0)
    assert (low, high) == (pytest.approx(0.9398, abs=1e-3), pytest.approx(1.0))
    assert wilson_interval(0.5, 10) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))


def test_attempts_at_one_task_do_not_count_as_independent():
    draws = random.Random(1)
    covered = naive = 0
    for trial in range(200):
        # Each task is either always or never solved: 8 attempts say no more than one.
        found = [Tally(passed=8 * (draws.random() < 0.5), scored=8) for _ in range(40)]
        low, high = clustered_interval(found, seed=trial, resamples=200)
        covered += low <= 0.5 <= high
        low, high = wilson_interval(pass_rate(found), 320)
        naive += low <= 0.5 <= high
    assert covered >= 0.88 * 200
    assert naive <= 0.7 * 200
