"""Charts as SVG inside the page: nothing to load, values on hover, colours from the page's style."""

import math
from collections.abc import Sequence

import msgspec

from etude.dashboard.html import Html, element, joined

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
NUM_COLOURS = 6
MAX_POINTS = 240
MAX_DOTS = 60

_SMALL = 1e-3
"""Below it, zeros hide the digits."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Step and value, by step; values that are not finite leave a gap."""

    def thinned(self) -> Sequence[tuple[float, float]]:
        """Return at most about `MAX_POINTS` of the points, the last one among them."""
        stride = -(-len(self.points) // MAX_POINTS)
        return self.points if stride <= 1 else [*self.points[:-1:stride], self.points[-1]]


class _Scale(msgspec.Struct, frozen=True, kw_only=True):
    """From values to places on the canvas."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(series: Sequence[Series]) -> Html | None:
    """Return a line per series over steps, or None when no value is finite."""
    lines = [line.thinned() for line in series]
    finite = [point for line in lines for point in line if math.isfinite(point[1])]
    if not finite:
        return None
    steps = [step for step, _ in finite]
    ticks = nice_ticks(min(value for _, value in finite), max(value for _, value in finite))
    x = _Scale(low=min(steps), high=max(max(steps), min(steps) + 1), start=LEFT, end=WIDTH - RIGHT)
    y = _Scale(low=ticks[0], high=ticks[-1], start=HEIGHT - BOTTOM, end=TOP)
    return element(
        "svg",
        *(_grid_line(tick, y(tick)) for tick in ticks),
        *_step_labels(x, min(steps), max(steps)),
        *(_line(name.name, line, place, x, y) for place, (name, line) in enumerate(zip(series, lines, strict=True))),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=", ".join(line.name for line in series),
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers that enclose both ends."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [tick * width for tick in range(first, last + 1)]


def short(value: float) -> str:
    """Return a number in few characters: 0.125, 1.2k, 3.4e-05."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    for least, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / unit:.3g}{name}"
    return f"{value:.2e}" if 0 < size < _SMALL else f"{value:.4g}"


def interval_chart(rows: Sequence[tuple[str, float, tuple[float, float]]]) -> Html:
    """Return a dot with its interval per row on a scale from 0 to 1: name, rate, interval."""
    x = _Scale(low=0.0, high=1.0, start=70, end=WIDTH - 50)
    height = 34 * len(rows) + BOTTOM
    marks: list[Html] = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        marks.append(element("line", x1=x(tick), x2=x(tick), y1=4, y2=height - BOTTOM + 4, class_="grid"))
        marks.append(element("text", f"{tick:.0%}", x=x(tick), y=height - 6, class_="tick middle"))
    for place, (name, rate, (low, high)) in enumerate(rows):
        y = 20 + 34 * place
        colour = f"s{place % NUM_COLOURS}"
        marks += [
            element("text", name, x=0, y=y + 4, class_="label"),
            element("line", x1=x(low), x2=x(high), y1=y, y2=y, class_=f"interval {colour}"),
            element(
                "circle",
                element("title", f"{name}: {rate:.1%} (95 %: {low:.1%} to {high:.1%})"),
                cx=x(rate),
                cy=y,
                r=6,
                class_=f"dot {colour}",
            ),
            element("text", f"{rate:.1%}", x=WIDTH - 44, y=y + 4, class_="label"),
        ]
    return element("svg", *marks, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label="pass rates")


def _grid_line(tick: float, y: float) -> Html:
    """Return a horizontal line with its number."""
    return joined(
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"),
        element("text", short(tick), x=LEFT - 6, y=y + 3.5, class_="tick end"),
    )


def _step_labels(x: _Scale, first: float, last: float) -> list[Html]:
    """Return the first and the last step below the chart."""
    y = HEIGHT - 7
    labels = [element("text", short(first), x=x(first), y=y, class_="tick middle")]
    if last > first:
        labels.append(element("text", f"step {short(last)}", x=x(last), y=y, class_="tick end"))
    return labels


def _line(name: str, points: Sequence[tuple[float, float]], place: int, x: _Scale, y: _Scale) -> Html:
    """Return one series: a path with gaps, and dots that tell their value while there are few."""
    colour = f"s{place % NUM_COLOURS}"
    path, drawing = "", False
    for step, value in points:
        if math.isfinite(value):
            path += f"{'L' if drawing else 'M'}{x(step)} {y(value)}"
        drawing = math.isfinite(value)
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    dots = (
        element(
            "circle",
            element("title", f"{name} at step {short(step)}: {short(value)}"),
            cx=x(step),
            cy=y(value),
            r=2.6,
            class_=f"dot {colour}",
        )
        for step, value in (finite if len(finite) <= MAX_DOTS else finite[-1:])
    )
    return element("g", element("path", d=path, class_=f"line {colour}"), *dots)
