# pyright: basic, reportOptionalMemberAccess=false
"""Verdicts that are no rewards."""

import asyncio
import json
import math

import pytest
from failure_kit import task
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from etude.algorithm.advantages import centred
from etude.config import HarnessSection
from etude.interfaces import ExecResult, Grade, SessionRecord
from etude.rewards.verdict import read_verdict
from etude.rollout.buffer import Ticket
from etude.rollout.doubles import ScriptedBackend, ScriptedHost
from etude.rollout.group import GroupPlan, play_group
from etude.rollout.player import HarnessPlayer
from etude.types import Outcome, SamplingParams

WAITS = {"P-85": "judges: there is no judge yet whose time-outs and rate limits could stop anything"}

NUMBERS = st.floats() | st.integers(-20, 20)
SAID = (
    st.binary(max_size=40)
    | NUMBERS.map(str).map(str.encode)
    | st.sampled_from(
        [b"7", b"10", b"0.8x", b"0.8/1", b'{"reward": 0.8', b"'1'", b"[1]", b"null", b"1e999", b"-0.1", b"1_0"]
    )
    | st.dictionaries(st.text(max_size=5) | st.just("reward"), NUMBERS | st.text(max_size=3))
    .map(json.dumps)
    .map(str.encode)
)


def clamped(said: bytes) -> float:
    """The mistake: whatever is said becomes a reward."""
    try:
        return min(1.0, max(0.0, float(said)))
    except ValueError:
        return 0.0


@pytest.mark.row("P-84")
@given(SAID, st.sampled_from(["reward.json", "reward.txt"]))
def test_a_verdict_is_a_number_that_was_said_or_no_verdict(said, name):
    """Out of range, not a number or broken JSON: an error that says so, never a clamped value or a zero."""
    assert (clamped(b"7"), clamped(b"0.8x")) == (1.0, 0.0)

    grade = read_verdict({name: said})
    if grade.reward is None:
        assert grade.failure.startswith("bad_reward: ")
        return
    assert 0.0 <= grade.reward <= 1.0
    if name == "reward.txt":
        assert float(said) == grade.reward
    else:
        values = json.loads(said)
        assert all(math.isfinite(value) for value in values.values())
        assert grade.reward == pytest.approx(values.get("reward", sum(values.values()) / len(values)))


class OneFails:
    """A grader that fails itself once, and gives the others what it is told."""

    def __init__(self, rewards):
        self.grades = [Grade(reward=None, failure="judge: no answer"), *(Grade(reward=reward) for reward in rewards)]

    async def grade(self, task, change):
        return self.grades.pop(0)


@pytest.mark.row("P-86")
async def test_a_failed_judgement_is_no_part_of_the_baseline():
    """An attempt without a judgement is in neither the group nor its mean, and not replaced by a number."""
    rewards = [1.0, 1.0, 0.5, 1.0]

    def advantages(trajectories):
        return centred([trajectory.reward or 0.0 for trajectory in trajectories], group_size=len(trajectories))

    player = HarnessPlayer(
        host=ScriptedHost(SessionRecord(nodes=(), messages=(), num_calls=1)),
        backend=ScriptedBackend(ExecResult(exit_code=0, stdout=b"", stderr=b"")),
        grader=OneFails(rewards),
        harness=HarnessSection(),
        params=SamplingParams(),
    )
    ticket = Ticket(number=0, task_id="t", admitted_version=0)
    plan = GroupPlan(seed=1, size=5, min_survivors=2, retries=2)
    group = await play_group(player, task(), ticket, plan, concurrency=asyncio.Semaphore(1))
    (failed,) = group.unscored
    assert (failed.outcome, failed.reward) == (Outcome.JUDGE_ERROR, None)

    # The mistake: the row is masked, but its placeholder was in the mean.
    placeholder = replace(failed, reward=0.0)
    masked = advantages([placeholder, *group.group.trajectories])[1:]
    assert masked != advantages(group.group.trajectories)

    assert sum(advantages(group.group.trajectories)) == pytest.approx(0.0)
    assert [trajectory.reward for trajectory in group.group.trajectories] == rewards
