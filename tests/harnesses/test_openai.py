# pyright: basic, reportOptionalMemberAccess=false
"""Agents on OpenAI's SDK, in a sandbox, on a repository whose tests fail."""

import pytest
import pytest_asyncio
from harness_kit import REPAIRED, harness_of, stage
from harness_table import row
from shell_scenarios import MALFORMED, SUBMITS, play

from etude.types import Outcome

REFUSED = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["openai-chat", "openai-responses"])
async def sessions(request, tmp_path_factory):
    """Every session of one of the two, by name."""
    async with stage(harness_of(request.param), tmp_path_factory.mktemp("stage")) as on_stage:
        yield await play(on_stage, SUBMITS)


@pytest.mark.parametrize(
    ("name", "num_calls", "num_requests"),
    [("repair", 4, 4), ("parallel calls", 2, 2), ("busy twice", 4, 6), ("cut off", 4, 5)],
)
def test_it_repairs_the_repository_and_nothing_is_drawn_twice(sessions, name, num_calls, num_requests):
    session = sessions[name]
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 1.0), session.said
    assert session.change.keys() == {REPAIRED}
    assert session.edges == ["root", *["continuation"] * (num_calls - 1)]
    assert session.num_requests == num_requests
    assert session.record.failure is None


def test_results_of_parallel_calls_come_in_their_order(sessions):
    last = sessions["parallel calls"].prompts[-1].turns[-1].text
    assert last.index("README.md") < last.index("(no output)") < last.index("OK")


def test_a_connection_that_was_cut_is_answered_with_what_was_drawn(sessions):
    session = sessions["cut off"]
    assert (session.num_cut, session.record.metrics["gateway/replays"]) == (1, 1)


def test_a_malformed_call_is_shown_as_the_text_that_it_is(sessions):
    session = sessions["malformed call"]
    assert session.said.rstrip().endswith(MALFORMED)
    assert session.record.metrics["gateway/tool_parse_errors"] == 1
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 0.0)


@pytest.mark.parametrize(
    ("name", "truncated", "num_requests"), [("overflow", "context", 3), ("out of calls", "calls", 3), ("closed", "", 4)]
)
def test_what_is_refused_for_good_is_asked_for_once(sessions, name, truncated, num_requests):
    session = sessions[name]
    assert (session.trajectory.harness_exit, session.record.truncated) == (REFUSED, truncated), session.said
    assert session.num_requests == num_requests
    assert session.trajectory.outcome is (Outcome.TRUNCATED if truncated else Outcome.SCORED)


def test_an_answer_that_is_cut_short_ends_the_session_in_order(sessions):
    assert sessions["out of tokens"].trajectory.harness_exit == 0, sessions["out of tokens"].said


def test_no_prefix_breaks_and_every_token_is_trained(sessions):
    counted = row("openai", list(sessions.values()))
    assert counted["prefix_break_rate"] == 0
    assert counted["trained"] == counted["drawn"]
