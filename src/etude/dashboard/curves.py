"""Which metrics are drawn together, and in which order; names nobody planned for get a chart of their own."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import msgspec

from etude.dashboard.chart import NUM_COLOURS, Series
from etude.dashboard.run_view import Row

NOT_METRICS = frozenset({"step", "version", "time", "stage"})

MAX_CHARTS = 80


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Series that belong together."""

    title: str
    series: tuple[Series, ...]


_PLANNED: tuple[tuple[str, str], ...] = (
    ("Reward", r"reward(/mean|_mean)?$"),
    ("Pass rate on the training tasks", r"pass_rate$"),
    ("Mismatch of sampler and trainer (k3), per pool", r"mismatch/k3"),
    ("Staleness, in versions", r"staleness"),
    ("Entropy", r"entropy"),
    ("Gradient norm", r"grad_norm$"),
    ("Loss", r"(^|[/_])loss$"),
    ("Tokens per second", r"tokens_per_s$"),
    ("Seconds of a step", r"(^|[/_])(step|wait)_s$"),
    ("Share of drawn tokens with everything recorded", r"^capture/"),
)
"""Title and what puts a metric there, by its name; the first match wins."""


def charts(rows: Sequence[Row]) -> tuple[list[Chart], list[Chart]]:
    """Return the charts everyone wants to see, in order, and those of all other metrics, by name."""
    found = {name: _series(name, rows) for name in _metric_names(rows)}
    planned: list[Chart] = []
    for title, pattern in _PLANNED:
        names = [name for name in found if re.search(pattern, name)]
        planned += _split(title, [found.pop(name) for name in names])
    others = [chart for kind, alike in groupby(found.values(), key=_kind) for chart in _split(kind, list(alike))]
    return planned, others[:MAX_CHARTS]


def stages(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each stage, stages in order of their first row."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("stage", "")), []).append(row)
    return found


def number(row: Row, name: str) -> float | None:
    """Return a row's value if it is a number; those that JSON lacks are written as text."""
    value = row.get(name)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def last_values(rows: Iterable[Row]) -> Mapping[str, float]:
    """Return the newest number of every metric."""
    newest: dict[str, float] = {}
    for row in rows:
        newest |= {name: value for name in row if (value := number(row, name)) is not None}
    return newest


def _metric_names(rows: Sequence[Row]) -> list[str]:
    names = {name for row in rows for name in row if number(row, name) is not None}
    return sorted(names - NOT_METRICS)


def _series(name: str, rows: Sequence[Row]) -> Series:
    """Return a metric over steps; a step that was done again after a resume counts once, with its last value."""
    points = {step: value for row in rows if (value := number(row, name)) is not None
              and (step := number(row, "step")) is not None}  # fmt: skip
    return Series(name=name, points=tuple(sorted(points.items())))


def _kind(series: Series) -> str:
    """Return what series of one chart have in common: `mismatch/k3/a` and `mismatch/k3/b` differ in the pool only."""
    return "/".join(series.name.split("/")[:2])


def _split(title: str, series: Sequence[Series]) -> list[Chart]:
    """Return charts of series of one room, none with more lines than there are colours."""
    made: list[Chart] = []
    for _, alike in groupby(series, key=lambda line: line.name.partition("/")[0]):
        members = tuple(alike)
        made += [
            Chart(title=title, series=members[start : start + NUM_COLOURS])
            for start in range(0, len(members), NUM_COLOURS)
        ]
    return made
