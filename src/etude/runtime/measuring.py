"""Evaluation of a run's newest policy version on its held-out tasks."""

from collections.abc import Sequence

import msgspec

from etude.config import RunConfig
from etude.errors import HarnessError, RunError
from etude.evaluation.suite import EvalPlan, EvalReport, evaluate, report_key
from etude.runtime.directory import RunDirectory
from etude.runtime.fleet import Fleet
from etude.telemetry.console import Console
from etude.types import Failure, Task, Trajectory
from etude.weights.reader import read_head


async def measure(
    run: RunDirectory, config: RunConfig, fleet: Fleet, tasks: Sequence[Task], console: Console
) -> EvalReport:
    """Return how the newest version does on these tasks, with the report stored under evals/.

    Raises:
        HarnessError: Too many attempts failed, the last one because the harness could not start.
        RunError: Too many attempts failed for the pass rate to mean something.
    """
    head = await read_head(run.store)
    assert head is not None
    await fleet.wait_until_served(head)
    plan = EvalPlan(attempts=config.eval.attempts, seed=config.run.seed, concurrency=config.environment.concurrency)
    failures: list[Failure] = []
    with console.progress(f"eval of version {head.version}", len(tasks) * plan.attempts) as advance:
        known: set[tuple[str, int]] = set()

        def told(trajectory: Trajectory) -> None:
            # A replaced attempt and its replacement are one piece of work.
            place = (trajectory.task_id, trajectory.index)
            advance(place not in known)
            known.add(place)
            if trajectory.failure is not None:
                failures.append(trajectory.failure)

        report = await evaluate(fleet.player, tasks, plan, version=head.version, on_trajectory=told)
    await run.store.put(report_key(report.version), msgspec.json.format(msgspec.json.encode(report), indent=1))
    if not report.is_valid:
        raise _invalid(report, failures[-1])
    low, high = report.interval
    console.note(
        f"version {report.version} passes {report.pass_rate:.1%} of {report.tasks} held-out tasks "
        f"({report.attempts} attempts each, 95 % interval {low:.1%} to {high:.1%})"
    )
    return report


def _invalid(report: EvalReport, last: Failure) -> RunError | HarnessError:
    """Return the error for an evaluation that says nothing about the policy, with what ended the last attempt."""
    kind = HarnessError if last.component == "harness" else RunError
    return kind(
        f"{report.infra_failures} of {report.attempts * report.tasks} attempts failed for reasons that are not the "
        f"policy's. The last one failed in {last.component}: {last.reason}: {last.message}"
    )
