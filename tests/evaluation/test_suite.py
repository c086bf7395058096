"""Promises of evaluations."""

import math

import msgspec
import pytest

from etude.errors import ConfigError
from etude.evaluation.suite import EvalPlan, EvalReport, evaluate
from etude.rollout.doubles import ScriptedPlayer
from etude.types import Outcome, Task, Trajectory

PLAN = EvalPlan(attempts=4, seed=1, concurrency=3)
TASKS = [Task(task_id=f"t{number}", path=f"/t{number}", digest="d", instruction="fix") for number in range(5)]


def half(_task: Task, index: int, _attempt: int) -> tuple[Outcome, float | None, int]:
    return (Outcome.SCORED if index else Outcome.TRUNCATED, float(index % 2), 1)


async def test_every_attempt_is_played_at_exactly_one_version_within_the_bound():
    player = ScriptedPlayer(half)
    report = await evaluate(player, TASKS, PLAN, version=7)
    assert player.versions == [(None, 7)] * 20
    assert len(set(player.seeds.values())) == 20
    assert player.num_alive_max == 3
    assert (report.version, report.tasks, report.attempts, report.scored) == (7, 5, 4, 20)
    assert (report.pass_rate, report.mean_reward, report.truncated) == (0.5, 0.5, 5)
    assert report.pass_at == {"1": 0.5, "2": pytest.approx(5 / 6), "4": 1.0}
    assert report.is_valid


async def test_two_versions_face_the_same_draws():
    first, second = ScriptedPlayer(half), ScriptedPlayer(half)
    await evaluate(first, TASKS, PLAN, version=0)
    await evaluate(second, TASKS, PLAN, version=9)
    assert sorted(first.seeds.values()) == sorted(second.seeds.values())


async def test_failures_are_tried_again_and_then_counted_apart_from_the_rate():
    def script(_task: Task, index: int, attempt: int) -> tuple[Outcome, float | None, int]:
        if index == 0:
            return (Outcome.INFRA_ERROR, None, 0)
        if index == 1 and not attempt:
            return (Outcome.INFRA_ERROR, None, 0)
        return (Outcome.JUDGE_ERROR, None, 0) if index == 2 else (Outcome.SCORED, 1.0, 0)

    heard: list[Trajectory] = []
    report = await evaluate(ScriptedPlayer(script), TASKS, PLAN, version=1, on_trajectory=heard.append)
    assert report.pass_rate == 1.0
    assert (report.infra_failures, report.held) == (10, 0)
    assert report.failures == {"sandbox/scripted": 20}
    assert len(heard) == 30
    assert not report.is_valid


async def test_a_held_attempt_is_neither_a_score_nor_a_failure():
    def script(_task: Task, index: int, _attempt: int) -> tuple[Outcome, float | None, int]:
        return (Outcome.SCORED, 1.0, 0) if index else (Outcome.HELD, None, 0)

    report = await evaluate(ScriptedPlayer(script), TASKS, PLAN, version=1)
    assert (report.held, report.infra_failures, report.scored, report.is_valid) == (5, 0, 15, True)


async def test_a_report_without_any_score_claims_nothing():
    broken = ScriptedPlayer(lambda _task, _index, _attempt: (Outcome.INFRA_ERROR, None, 0))
    report = await evaluate(broken, TASKS, PLAN, version=1)
    assert (report.pass_rate, report.mean_reward, report.interval, report.pass_at) == (None, None, (0.0, 1.0), {})
    assert msgspec.json.decode(msgspec.json.encode(report), type=EvalReport) == report


async def test_every_number_of_a_report_is_finite():
    report = await evaluate(ScriptedPlayer(half), TASKS, PLAN, version=1)
    assert all(math.isfinite(value) for value in (*report.interval, *report.pass_at.values(), report.seconds))


async def test_an_evaluation_without_tasks_is_refused():
    with pytest.raises(ConfigError, match=r"tasks\.heldout"):
        await evaluate(ScriptedPlayer(half), [], PLAN, version=1)
