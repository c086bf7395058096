# pyright: basic, reportOptionalMemberAccess=false
"""mini-swe-agent as PyPI has it, in a sandbox, on a repository whose tests fail."""

import pytest
import pytest_asyncio
from harness_kit import REPAIRED, harness_of, missing, stage
from harness_table import row
from shell_scenarios import ECHOES, play

from etude.types import Outcome

NAME = "mini-swe-agent"
pytestmark = pytest.mark.skipif(bool(missing(NAME)), reason=missing(NAME) or "it is installed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions(tmp_path_factory):
    """Every session, by name."""
    async with stage(harness_of(NAME), tmp_path_factory.mktemp("stage"), timeout_s=60) as on_stage:
        yield await play(on_stage, ECHOES)


@pytest.mark.parametrize(
    ("name", "num_calls", "num_requests"),
    [("repair", 4, 4), ("parallel calls", 2, 2), ("busy twice", 4, 6), ("cut off", 4, 5), ("malformed call", 4, 4)],
)
def test_it_repairs_the_repository_and_nothing_is_drawn_twice(sessions, name, num_calls, num_requests):
    session = sessions[name]
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 1.0), session.said
    assert (session.trajectory.harness_exit, session.change.keys()) == (0, {REPAIRED})
    assert session.edges == ["root", *["continuation"] * (num_calls - 1)]
    assert session.num_requests == num_requests
    assert session.record.failure is None


def test_results_of_parallel_calls_come_in_their_order(sessions):
    last = sessions["parallel calls"].prompts[-1].turns[-1].text
    assert last.index("README.md") < last.index('"output": ""') < last.index("OK")


def test_a_connection_that_was_cut_is_answered_with_what_was_drawn(sessions):
    session = sessions["cut off"]
    assert (session.num_cut, session.record.metrics["gateway/replays"]) == (1, 1)


def test_an_answer_that_it_throws_away_stays_a_branch_of_its_own(sessions):
    nodes = sessions["malformed call"].trajectory.nodes
    assert [node.parent for node in nodes] == [None, 0, 0, 2]
    assert "Tool call error" in sessions["malformed call"].prompts[2].turns[-1].text


def test_a_context_that_is_full_ends_it_at_once(sessions):
    session = sessions["overflow"]
    assert (session.trajectory.outcome, session.record.truncated) == (Outcome.TRUNCATED, "context")
    assert "ContextWindowExceededError" in session.said


@pytest.mark.parametrize(("name", "truncated"), [("out of calls", "calls"), ("closed", "")])
def test_what_is_refused_for_good_is_asked_for_once(sessions, name, truncated):
    session = sessions[name]
    assert (session.trajectory.harness_exit, session.record.truncated) == (1, truncated), session.said
    assert session.num_requests == len(session.trajectory.nodes) + 1


def test_no_prefix_breaks_and_every_token_is_trained(sessions):
    counted = row(NAME, list(sessions.values()))
    assert counted["prefix_break_rate"] == 0
    assert counted["trained"] == counted["drawn"]
