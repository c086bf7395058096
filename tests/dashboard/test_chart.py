"""Promises of the charts."""

import math

from hypothesis import given
from hypothesis import strategies as st

from etude.dashboard.chart import HEIGHT, MAX_POINTS, Series, interval_chart, line_chart, nice_ticks, short
from etude.dashboard.curves import charts

values = st.floats(-1e12, 1e12) | st.sampled_from([0.0, 1e-300, 5e-324, -1e-9])


@given(values, values)
def test_ticks_are_few_and_enclose_the_values(first: float, second: float):
    low, high = min(first, second), max(first, second)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert 2 <= len(ticks) <= 8
    assert ticks[0] - slack <= low <= high <= ticks[-1] + slack


@given(st.lists(st.tuples(st.integers(0, 10**6), values | st.sampled_from([math.nan, math.inf])), max_size=30))
def test_any_series_is_drawn_or_left_out_but_never_breaks(points: list[tuple[int, float]]):
    series = Series(name="<x>", points=tuple(sorted((float(step), value) for step, value in points)))
    drawn = line_chart([series])
    assert (drawn is None) == (not any(math.isfinite(value) for _, value in points))
    assert drawn is None or "nan" not in drawn.split("d=")[1].split(">")[0]


def test_a_value_that_is_not_finite_leaves_a_gap():
    drawn = line_chart([Series(name="loss", points=((1, 1.0), (2, math.nan), (3, 2.0)))])
    assert drawn is not None
    path = drawn.split('d="')[1].split('"')[0]
    assert path.count("M") == 2


def test_long_series_are_thinned_to_the_last_point():
    line = Series(name="x", points=tuple((float(step), 0.0) for step in range(10_001)))
    assert len(line.thinned()) <= MAX_POINTS + 2
    assert line.thinned()[-1] == (10_000.0, 0.0)


def test_everything_stays_on_the_canvas():
    drawn = line_chart([Series(name="x", points=tuple((float(step), step**3.0) for step in range(20)))])
    assert drawn is not None
    places = [float(part.split('"')[0]) for part in drawn.split('cy="')[1:]]
    assert all(0 <= place <= HEIGHT for place in places)


def test_numbers_are_short():
    assert [short(value) for value in (0.12345, 12_345, 3.4e-5, 2.5e6, 0.0, math.nan)] == [
        "0.1235",
        "12.3k",
        "3.40e-05",
        "2.5M",
        "0",
        "nan",
    ]


def test_rates_are_shown_with_their_interval():
    drawn = interval_chart([("before", 0.4, (0.3, 0.5)), ("after", 0.9, (0.8, 0.95))])
    assert "after: 90.0% (95 %: 80.0% to 95.0%)" in drawn


def test_metrics_nobody_planned_for_get_a_chart_and_pools_share_one():
    rows = [
        {"step": 1, "mismatch/k3/a": 0.1, "mismatch/k3/b": 0.2, "new/thing_count": 3, "other/x/a": 1, "other/x/b": 2,
         "note": "text", "flag": True},
        {"step": 2, "mismatch/k3/a": "nan"},
    ]  # fmt: skip
    planned, others = charts(rows)
    assert [[series.name for series in chart.series] for chart in planned] == [["mismatch/k3/a", "mismatch/k3/b"]]
    assert [chart.title for chart in others] == ["new/thing_count", "other/x"]
    assert math.isnan(planned[0].series[0].points[1][1])


def test_a_step_done_again_after_a_resume_counts_once():
    rows = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}, {"step": 2, "reward/mean": 0.3}]
    planned, _ = charts(rows)
    assert planned[0].series[0].points == ((1.0, 0.1), (2.0, 0.3))
