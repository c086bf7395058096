# pyright: basic
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.weight_types import Route
from etude.weights.planner import MAX_PATH, MAX_ROUTES, bytes_of, cheapest


def route(base, version, num_bytes=10) -> Route:
    return Route(base, version, num_bytes, "0" * 64)


@st.composite
def graphs(draw):
    newest = draw(st.integers(1, 7))
    pairs = [(base, version) for version in range(newest + 1) for base in (None, *range(version))]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14))
    routes = [route(base, version, draw(st.integers(0, 50))) for base, version in chosen]
    held = draw(st.none() | st.integers(0, newest))
    return routes, newest, held


def all_paths(routes, at, version):
    """Yield every way, tried one step at a time: slow and beyond doubt."""
    if at == version:
        yield []
        return
    for step in routes:
        if step.base == at and step.base is not None:
            for rest in all_paths(routes, step.version, version):
                yield [step, *rest]


@given(graphs(), st.integers(0, 30))
def test_no_way_is_cheaper_than_the_one_that_is_planned(graph, request_bytes):
    routes, version, held = graph
    starts = [] if held is None else list(all_paths(routes, held, version))
    for anchor in routes:
        if anchor.base is None and version != held:
            starts += [[anchor, *rest] for rest in all_paths(routes, anchor.version, version)]
    if not starts:
        with pytest.raises(IntegrityError, match="no route leads"):
            cheapest(routes, version=version, held=held, request_bytes=request_bytes)
        return
    best = min(bytes_of(path) + request_bytes * len(path) for path in starts)
    planned = cheapest(routes, version=version, held=held, request_bytes=request_bytes)
    assert bytes_of(planned) + request_bytes * len(planned) == best
    position = held
    for step in planned:
        assert step.base in (None, position)
        position = step.version
    assert position == version


def test_a_reader_that_is_up_to_date_never_takes_the_anchor_beside_its_difference():
    routes = [route(None, 0, 1000), route(0, 1, 10), route(None, 1, 1000)]
    assert cheapest(routes, version=1, held=0) == [routes[1]]
    assert cheapest(routes, version=1) == [routes[2]]
    assert cheapest(routes, version=1, held=1) == ()


def test_a_reader_that_lags_takes_the_difference_that_skips():
    routes = [route(n, n + 1, 100) for n in range(16)] + [route(8, 16, 300)]
    assert cheapest(routes, version=16, held=8, request_bytes=0) == [routes[-1]]
    assert cheapest(routes, version=16, held=7, request_bytes=0) == [routes[7], routes[-1]]


@pytest.mark.parametrize(
    "bad",
    [
        [route(0, 1), route(1, 0)],
        [route(1, 1)],
        [route(-1, 1)],
        [route(None, -1)],
        [route(0, 1, -1)],
        [route(0, 1, 1 << 60)],
        [route(0, 1), route(0, 1)],
        [route(None, 1), route(None, 1, 5)],
    ],
)
def test_routes_that_no_publisher_writes_are_refused(bad):
    with pytest.raises(IntegrityError, match="refused"):
        cheapest(bad, version=1, held=0)


def test_a_million_routes_are_refused_at_once_and_the_most_allowed_are_planned_in_seconds():
    started = time.process_time()
    with pytest.raises(IntegrityError, match="1000000 routes"):
        cheapest([route(0, 1)] * 1_000_000, version=1, held=0)
    routes = [route(n, n + 1) for n in range(MAX_ROUTES - 1)] + [route(None, 0)]
    with pytest.raises(IntegrityError, match="at most 1024"):
        cheapest(routes, version=MAX_ROUTES - 1)
    assert len(cheapest(routes, version=MAX_PATH - 1)) == MAX_PATH
    assert time.process_time() - started < 10
