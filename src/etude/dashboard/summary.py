"""What `etude status` and `etude show` print, as data."""

from collections.abc import Sequence

import msgspec

from etude.dashboard.curves import last_values, number
from etude.dashboard.run_view import Rollout, Row, RunView
from etude.errors import StoreError
from etude.telemetry.lines import printable


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    stage: str
    """The stage of the newest row of metrics; empty before the first."""
    step: int | None
    """Of that stage."""
    steps: int | None
    """That the training stage is configured for."""
    version: int | None
    """Newest policy version."""
    pass_rate_before: float | None
    pass_rate_after: float | None
    seconds: float | None
    """Of the whole run, once it has ended."""
    idle_s: float | None
    """Since the newest row was written."""
    last_row: Row
    """The newest row of metrics, whatever is in it."""
    num_rollouts: int
    unreadable: tuple[str, ...]
    next_action: str
    """What to do now."""


class RolloutLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout in a list."""

    name: str
    """What `etude show RUN NAME` takes."""
    task_id: str
    outcome: str
    reward: float | None
    turns: int
    seconds: float
    policy_versions: tuple[int, int] | None


def status_of(view: RunView, *, run: str, now: float) -> RunStatus:
    """Return how far a run is and what to do next.

    Args:
        view: The run.
        run: How the user calls it.
        now: Seconds since 1970.
    """
    last: Row = view.rows[-1] if view.rows else {}
    versions = [value for row in view.rows if (value := number(row, "version")) is not None]
    steps = view.setting("trainer", "steps")
    step, written = number(last, "step"), number(last, "time")
    return RunStatus(
        stage=str(last.get("stage", "")),
        step=None if step is None else int(step),
        steps=steps if isinstance(steps, int) else None,
        version=int(max(versions)) if versions else None,
        pass_rate_before=view.summary.pass_rate("before"),
        pass_rate_after=view.summary.pass_rate("after"),
        seconds=view.summary.seconds,
        idle_s=None if written is None else max(0.0, now - written),
        last_row=last,
        num_rollouts=len(view.rollout_names),
        unreadable=view.unreadable,
        next_action=_next_action(view, run),
    )


def status_text(status: RunStatus) -> str:
    """Return a status in a few lines."""
    of = f" of {status.steps}" if status.steps and status.stage == "train" else ""
    lines = [f"stage      {status.stage or 'not started'}"]
    if status.step is not None:
        lines.append(f"step       {status.step}{of}")
    if status.version is not None:
        lines.append(f"version    {status.version}")
    rates = [f"{rate:.1%} {when}" for when, rate in
             (("before", status.pass_rate_before), ("after", status.pass_rate_after)) if rate is not None]  # fmt: skip
    if rates:
        lines.append(f"pass rate  {', '.join(rates)}")
    if status.seconds is not None:
        lines.append(f"seconds    {status.seconds:.1f}")
    if status.idle_s is not None:
        lines.append(f"last row   {status.idle_s:.0f} s ago")
    lines.append(f"rollouts   {status.num_rollouts}")
    metrics = last_values([status.last_row])
    lines += [f"           {name} = {value:.4g}" for name, value in sorted(metrics.items()) if "/" in name]
    lines += [f"unreadable {problem}" for problem in status.unreadable]
    lines.append(f"next       {status.next_action}")
    return "\n".join(map(printable, lines))


def rollout_line(rollout: Rollout) -> RolloutLine:
    """Return a rollout as one entry of a list."""
    sidecar = rollout.document.extra.etude
    return RolloutLine(
        name=rollout.name,
        task_id=sidecar.task_id,
        outcome=sidecar.outcome,
        reward=sidecar.reward,
        turns=sum(step.source == "agent" for step in rollout.document.steps),
        seconds=sidecar.seconds,
        policy_versions=sidecar.policy_versions,
    )


def rollout_text_line(line: RolloutLine) -> str:
    """Return a list's entry for people."""
    reward = "-" if line.reward is None else f"{line.reward:.3g}"
    versions = "" if line.policy_versions is None else "v{}-{}".format(*line.policy_versions)
    facts = f"{reward:>6}  {line.turns:>3} turns {line.seconds:>7.1f} s  {versions:<9}"
    return printable(f"{line.name:<24} {line.outcome:<12} {facts} {line.task_id}")


def chosen(names: Sequence[str], wanted: str | None) -> list[str]:
    """Return the rollouts that a user means by a name, a group, or nothing (all).

    Raise `StoreError` when there is none.
    """
    found = [name for name in names if wanted is None or name == wanted or name.startswith(f"{wanted}/")]
    if not found:
        msg = "the run has no rollouts yet" if wanted is None else f"the run has no rollout or group {wanted!r}"
        raise StoreError(f"{msg}; etude show RUN lists {len(names)}")
    return found


def _next_action(view: RunView, run: str) -> str:
    """Return what someone who looks at the run wants to do now."""
    if view.summary.pass_rate("after") is not None:
        return f"the run is complete: open {run.rstrip('/')}/report.html, or read rollouts with etude show {run}"
    if not view.rows:
        return "nothing was measured yet: start the run, or look at the terminal where it was started"
    return "if the run is not going on right now, repeat the command that started it: it resumes from its checkpoint"
