# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Codex as npm has it, in a sandbox, on a repository whose tests fail."""

import codex_kit as kit
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


@pytest.mark.parametrize("name", ["repair", "busy and cut off", "sub-agents", "compaction"])
def test_it_repairs_the_repository_and_breaks_no_prefix_undeclared(sessions, name):
    session = sessions[name]
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 1.0), session.said
    assert (session.trajectory.harness_exit, session.change.keys()) == (0, {REPAIRED})
    assert (session.prefix_breaks, session.record.failure) == (0, None)


def test_parallel_calls_are_one_answer_and_their_results_one_continuation(sessions):
    session = sessions["repair"]
    assert session.edges == ["root", "continuation", "continuation", "continuation"]
    results = session.prompts[1].turns[-1].text
    assert results.index("def slug") < results.index("FAILED")


def test_the_policy_has_the_tools_of_namespaces_and_reads_the_grammar_of_patches(sessions):
    tools = {tool["function"]["name"]: tool["function"] for tool in sessions["repair"].record.tools}
    assert {"exec_command", "apply_patch", "multi_agent_v1__spawn_agent"} <= tools.keys()
    assert not {"view_image", "web_search"} & tools.keys()
    assert "begin_patch" in tools["apply_patch"]["parameters"]["properties"]["input"]["description"]


def test_a_busy_model_is_asked_again_and_a_cut_answer_is_a_retry(sessions):
    session = sessions["busy and cut off"]
    assert (session.num_cut, session.num_requests) == (1, 6)
    assert sorted(session.edges) == ["continuation", "continuation", "continuation", "retry", "root"]


def test_each_sub_agent_is_a_branch_that_is_called_and_returns(sessions):
    nodes = sessions["sub-agents"].trajectory.nodes
    assert [node.link for node in nodes if node.edge is Edge.SUBAGENT_CALL] == [0, 0]
    assert Edge.SUBAGENT_RETURN in [node.edge for node in nodes]


def test_it_goes_on_from_a_summary_that_the_policy_wrote_without_tools(sessions):
    nodes = sessions["compaction"].trajectory.nodes
    (compaction,) = [node for node in nodes if node.edge is Edge.COMPACTION]
    summary = nodes[compaction.link]
    assert (summary.edge, summary.reason, summary.link) == (Edge.REWRITE, "summary_without_tools", summary.node_id - 1)


def test_a_limit_ends_it_and_what_it_left_is_graded(sessions):
    session = sessions["out of calls"]
    assert (session.trajectory.harness_exit, session.record.truncated) == (1, "calls")
    assert session.num_requests == len(session.trajectory.nodes) + 1, "it asks once and believes it"
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.TRUNCATED, 1.0)


def test_an_answer_that_is_cut_short_ends_it(sessions):
    session = sessions["out of tokens"]
    assert "max_output_tokens" in session.said
    assert (session.trajectory.harness_exit, session.trajectory.reward) == (1, 0.0)


def test_every_token_is_trained_or_accounted_for(sessions):
    counted = row(kit.NAME, list(sessions.values()))
    assert (counted["masked"], list(counted["dropped"])) == ({}, ["superseded"])
