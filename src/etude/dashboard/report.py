"""The report of a run: one file that opens anywhere, without a server, a script or the network."""

from collections.abc import Iterator, Mapping, Sequence

from etude.dashboard.chart import interval_chart, line_chart, short
from etude.dashboard.curves import Chart, charts, last_values, stages
from etude.dashboard.html import Html, element, joined, page
from etude.dashboard.run_view import Row, RunView, load_run
from etude.dashboard.style import STYLE
from etude.dashboard.transcript import rollout_html
from etude.evaluation.suite import EvalReport
from etude.interfaces import ObjectStore
from etude.telemetry.metrics import find

REPORT_KEY = "report.html"
NUM_ROLLOUTS = 12


async def write_report(store: ObjectStore) -> str:
    """Write the report into the run directory and return its key."""
    view = await load_run(store, rollouts=NUM_ROLLOUTS)
    await store.put(REPORT_KEY, render_report(view).encode())
    return REPORT_KEY


def render_report(view: RunView) -> str:
    """Return the report as a whole HTML document."""
    url = view.setting("run", "url")
    name = url.rstrip("/").rpartition("/")[2] if isinstance(url, str) else "run"
    body = element(
        "main",
        _head(view, name),
        _evaluations(view),
        *_curves(view.rows),
        _rollouts(view),
        _configuration(view.config),
        _unreadable(view.unreadable),
    )
    return page(title=f"{name}: etude", style=STYLE, body=body)


def _head(view: RunView, name: str) -> Html:
    """Return the name of the run and its numbers at a glance."""
    newest = last_values(stages(view.rows).get("train", ()))
    facts = [
        ("pass rate before", _percent(view.summary.pass_rate("before"))),
        ("pass rate after", _percent(view.summary.pass_rate("after"))),
        ("steps", _short(newest.get("step"))),
        ("policy version", _short(newest.get("version"))),
        ("seconds in all", _short(view.summary.seconds)),
        ("seed", _short(view.summary.seed)),
    ]
    return joined(
        element("h1", name),
        element("p", "What the policy learned, how, and what it does now.", class_="soft"),
        element(
            "div",
            *(
                element(
                    "div", element("div", value, class_="value"), element("div", title, class_="name"), class_="card"
                )
                for title, value in facts
                if value is not None
            ),
            class_="facts",
        ),
        _stage_seconds(view.summary.stages),
    )


def _stage_seconds(seconds: Mapping[str, float]) -> Html | None:
    """Return how long each stage took."""
    parts = [f"{stage} {short(value)} s" for stage, value in seconds.items()]
    return element("p", "Stages: ", " · ".join(parts), class_="soft") if parts else None


def _evaluations(view: RunView) -> Html | None:
    """Return pass rates with intervals, and the tasks one by one."""
    measured = [report for report in view.evals if report.pass_rate is not None]
    rows = [(f"version {report.version}", report.pass_rate or 0.0, report.interval) for report in measured]
    rows = rows or list(_summarised(view))
    if not rows:
        return None
    return joined(
        element("h2", "Held-out tasks"),
        element(
            "div",
            element(
                "div",
                element("h3", "Pass rate, with the 95 % interval over tasks"),
                interval_chart(rows),
                class_="card",
            ),
            element("div", *map(_tasks, measured), class_="card") if measured else None,
            class_="wide",
        ),
    )


def _summarised(view: RunView) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Yield what the summary says about pass rates, for runs whose reports are elsewhere."""
    for when, measured in view.summary.eval.items():
        if (rate := measured.pass_rate) is not None:
            yield when, rate, measured.interval or (rate, rate)


def _tasks(report: EvalReport) -> Html:
    """Return one square per task, filled as far as its attempts passed."""
    squares = (
        element(
            "span",
            element("i", style=f"opacity:{result.passed / result.scored:.2f}") if result.scored else None,
            title=f"{result.task_id}: {result.passed} of {result.scored} passed",
        )
        for result in sorted(report.per_task, key=lambda result: result.task_id)
    )
    note = f"{report.tasks} tasks, {report.attempts} attempts each"
    if report.infra_failures:
        note += f", {report.infra_failures} failed"
    if report.held:
        note += f", {report.held} held"
    pass_at = ", ".join(f"pass@{k} {rate:.1%}" for k, rate in report.pass_at.items())
    return joined(
        element("h3", f"Version {report.version}: {note}"),
        element("p", pass_at, class_="soft"),
        element("div", *squares, class_="strip"),
        None if report.is_valid else element("p", "Too many failures for these numbers to mean much.", class_="bad"),
    )


def _curves(rows: Sequence[Row]) -> Iterator[Html]:
    """Yield the charts of each stage: training first, since that is what the report is about."""
    by_stage = stages(rows)
    for stage in sorted(by_stage, key=lambda stage: stage != "train"):
        planned, others = charts(by_stage[stage])
        drawn = [card for chart in planned if (card := _chart(chart)) is not None]
        if drawn:
            yield element("h2", f"Stage {stage}" if stage else "Metrics")
            yield element("div", *drawn, class_="grid-of")
        more = [card for chart in others if (card := _chart(chart)) is not None]
        if more:
            yield element(
                "details",
                element("summary", f"{len(more)} more metrics of {stage or 'the run'}", class_="soft"),
                element("div", *more, class_="grid-of"),
            )


def _chart(chart: Chart) -> Html | None:
    """Return a chart with its legend and the last values."""
    drawing = line_chart(chart.series)
    if drawing is None:
        return None
    legend = (
        element(
            "span",
            element("i", class_=f"s{place}"),
            f"{series.name} ",
            element("b", short(series.points[-1][1])),
            title=metric.meaning if (metric := find(series.name)) else None,
        )
        for place, series in enumerate(chart.series)
        if series.points
    )
    return element("div", element("h3", chart.title), drawing, element("div", *legend, class_="legend"), class_="card")


def _rollouts(view: RunView) -> Html | None:
    """Return the chosen rollouts, folded."""
    if not view.rollouts:
        return None
    return joined(
        element("h2", "Rollouts"),
        element(
            "p",
            f"{len(view.rollouts)} of {len(view.rollout_names)}, from all over the run; "
            "etude show RUN lists them all, etude show RUN ROLLOUT prints one.",
            class_="soft",
        ),
        *map(rollout_html, view.rollouts),
    )


def _configuration(config: str) -> Html | None:
    """Return the configuration, the origin of each value beside it."""
    if not config:
        return None
    lines: list[Html | str] = []
    for line in config.split("\n"):
        value, mark, origin = line.rpartition("  # ")
        lines += [value, element("span", f"{mark}{origin}\n", class_="origin")] if mark else [f"{line}\n"]
    return joined(
        element("h2", "Configuration"),
        element("details", element("summary", "run.toml, with the origin of each value"), element("pre", *lines),
                class_="card"),
    )  # fmt: skip


def _unreadable(problems: Sequence[str]) -> Html | None:
    """Return what could not be read, so that nothing is missing unnoticed."""
    if not problems:
        return None
    return joined(element("h2", "Could not be read"), element("pre", "\n".join(problems), class_="card"))


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _short(value: float | None) -> str | None:
    return None if value is None else short(value)
