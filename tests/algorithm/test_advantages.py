# pyright: basic
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithm.advantages import centred, is_graded, standardised
from etude.types import Outcome, Trajectory

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "recipe_vectors.json").read_text())["advantages"]
REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16)


def test_golden_advantages():
    rewards = GOLDEN["R"]
    assert centred(rewards, group_size=4) == pytest.approx(GOLDEN["centred"])
    assert centred(rewards, group_size=5) == pytest.approx(GOLDEN["rloo"])
    assert standardised(rewards) == pytest.approx(GOLDEN["std_ddof1"], abs=1e-9)


def test_two_survivors_of_eight_are_each_others_baseline():
    assert centred([1.0, 0.25], group_size=8) == pytest.approx([0.75, -0.75])


@given(REWARDS, st.integers(0, 4))
def test_advantages_sum_to_zero_and_survivors_get_the_leave_one_out_baseline(rewards, lost):
    advantages = centred(rewards, group_size=len(rewards) + lost)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    if lost:
        others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
        assert advantages == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)], abs=1e-6)


def test_a_tie_break_is_amplified_by_the_deviation_only():
    rewards = [1.0, 1.0, 1.0, 0.98]
    assert max(map(abs, centred(rewards, group_size=4))) == pytest.approx(0.015)
    assert max(map(abs, standardised(rewards))) > 1.4


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_there_is_no_baseline_of_one(rewards):
    with pytest.raises(ValueError, match="at least two"):
        centred(rewards, group_size=8)
    with pytest.raises(ValueError, match="at least two"):
        standardised(rewards)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_scored_and_truncated_rollouts_are_graded(outcome):
    made = Trajectory(rollout_id="r", group_id="g", task_id="t", index=0, outcome=outcome, reward=0.0)
    assert is_graded(made) == (outcome in (Outcome.SCORED, Outcome.TRUNCATED))
    unscored = Trajectory(rollout_id="r", group_id="g", task_id="t", index=0, outcome=outcome)
    assert not is_graded(unscored)
