# pyright: basic, reportOptionalMemberAccess=false
"""An agent on Anthropic's SDK that summarises by itself, in a sandbox, on a repository whose tests fail."""

import pytest
import pytest_asyncio
from harness_kit import REPAIRED, harness_of, stage
from harness_table import row
from shell_scenarios import MALFORMED, SUBMITS, SUMMARY, flooded, play

from etude.types import Outcome

REFUSED = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions(tmp_path_factory):
    """Every session, by name."""
    async with stage(harness_of("anthropic"), tmp_path_factory.mktemp("stage")) as on_stage:
        compacted = await on_stage.play(flooded(SUBMITS), arguments=("--compact-at", "6000"))
        yield {**await play(on_stage, SUBMITS), "compaction": compacted}


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


def test_a_malformed_call_is_shown_as_the_text_that_it_is(sessions):
    session = sessions["malformed call"]
    assert session.said.rstrip().endswith(MALFORMED)
    assert session.record.metrics["gateway/tool_parse_errors"] == 1


@pytest.mark.parametrize("name", ["compaction", "overflow"])
def test_a_context_that_grows_too_long_goes_on_from_a_summary_of_the_policys_own(sessions, name):
    session = sessions[name]
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 1.0), session.said
    asked = [turn.text for turn in session.prompts[-2].turns if turn.role == "user"]
    assert SUMMARY in asked[0]
    assert session.edges.count("compaction") == 1
    assert session.prefix_breaks == 0


@pytest.mark.parametrize(("name", "truncated", "num_requests"), [("out of calls", "calls", 3), ("closed", "", 4)])
def test_what_is_refused_for_good_is_asked_for_once(sessions, name, truncated, num_requests):
    session = sessions[name]
    assert (session.trajectory.harness_exit, session.record.truncated) == (REFUSED, truncated), session.said
    assert session.num_requests == num_requests


def test_no_prefix_breaks_and_every_token_is_trained(sessions):
    counted = row("anthropic", list(sessions.values()))
    assert counted["prefix_break_rate"] == 0
    assert counted["trained"] == counted["drawn"]
