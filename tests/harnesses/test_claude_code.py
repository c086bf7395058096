# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Claude Code as npm has it, in a sandbox, on a repository whose tests fail."""

import claude_code_kit as kit
import pytest
import pytest_asyncio
from harness_kit import REPAIRED, missing, stage
from harness_table import row

from etude.types import Edge, Outcome

pytestmark = pytest.mark.skipif(bool(missing(kit.NAME)), reason=missing(kit.NAME) or "it is installed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions(tmp_path_factory):
    """Every session, by name."""
    async with stage(kit.HARNESS, tmp_path_factory.mktemp("stage")) as on_stage:
        yield await kit.play(on_stage)


@pytest.mark.parametrize("name", ["repair", "busy and cut off", "tidied calls", "sub-agents", "compaction", "overflow"])
def test_it_repairs_the_repository_and_breaks_no_prefix(sessions, name):
    session = sessions[name]
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 1.0), session.said
    assert (session.trajectory.harness_exit, session.change.keys()) == (0, {REPAIRED})
    assert session.said.strip() == "The tests pass."
    assert (session.prefix_breaks, session.record.failure) == (0, None)


def test_parallel_calls_are_one_answer_and_their_results_one_continuation(sessions):
    session = sessions["repair"]
    assert session.edges == ["root", "continuation", "continuation", "continuation"]
    results = session.prompts[1].turns[-1].text
    assert results.index("def slug") < results.index("FAILED")


def test_the_policy_has_the_tools_that_work_in_a_sandbox(sessions):
    tools = {tool["function"]["name"] for tool in sessions["repair"].record.tools}
    assert {"Agent", "Bash", "Edit", "Read", "Write"} <= tools
    assert not {"WebFetch", "WebSearch"} & tools


def test_a_busy_model_is_asked_again_and_a_cut_answer_is_a_retry(sessions):
    session = sessions["busy and cut off"]
    assert (session.num_cut, session.num_requests) == (1, 6)
    assert sorted(session.edges) == ["continuation", "continuation", "continuation", "retry", "root"]


def test_calls_that_it_tidies_are_told_as_they_were_drawn(sessions):
    session = sessions["tidied calls"]
    assert session.edges == ["root", *["continuation"] * 8]
    calls = [call for message in session.record.messages for call in message.get("tool_calls", ())]
    assert '"limit": "3"' in calls[0]["function"]["arguments"]


def test_each_sub_agent_is_a_branch_that_is_called_and_returns(sessions):
    nodes = sessions["sub-agents"].trajectory.nodes
    agents = [node for node in nodes if node.edge is Edge.SUBAGENT_CALL]
    assert len(agents) == 3
    assert {nodes[node.link].edge for node in agents} <= {Edge.ROOT, Edge.SUBAGENT_RETURN}
    assert [node.edge for node in nodes].count(Edge.SUBAGENT_RETURN) == 2


@pytest.mark.parametrize("name", ["compaction", "overflow"])
def test_it_goes_on_from_a_summary_that_the_policy_wrote(sessions, name):
    nodes = sessions[name].trajectory.nodes
    (compaction,) = [node for node in nodes if node.edge is Edge.COMPACTION]
    assert nodes[compaction.link].edge is Edge.CONTINUATION


@pytest.mark.parametrize(
    ("name", "truncated", "reward"), [("out of calls", "calls", 1.0), ("out of tokens", "session_tokens", 0.0)]
)
def test_a_limit_ends_it_and_what_it_left_is_graded(sessions, name, truncated, reward):
    session = sessions[name]
    assert (session.trajectory.harness_exit, session.record.truncated) == (1, truncated)
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.TRUNCATED, reward)


def test_every_token_is_trained_or_accounted_for(sessions):
    counted = row(kit.NAME, list(sessions.values()))
    assert (counted["masked"], list(counted["dropped"])) == ({}, ["superseded"])
