# pyright: basic, reportOptionalMemberAccess=false
"""Claude Code as npm has it, in a sandbox, on a repository whose tests fail."""

import claude_code_kit as kit
import pytest
from harness_kit import missing, stage

from etude.types import Edge, Outcome

pytestmark = pytest.mark.skipif(bool(missing(kit.NAME)), reason=missing(kit.NAME) or "it is installed")


@pytest.fixture
async def played(tmp_path):
    async with stage(kit.HARNESS, tmp_path) as on_stage:

        async def play(answer, *, env=None, **options):
            session = await on_stage.play(answer, env={**kit.WINDOW, **(env or {})}, **options)
            assert session.output.exit_code == 0, session.said
            assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.SCORED, 1.0), session.said
            assert session.change.keys() == {kit.REPAIRED}
            return session

        yield play


async def test_it_repairs_with_parallel_calls_and_every_call_extends_the_one_before(played):
    session = await played(kit.repairs())
    assert session.edges == ["root", "continuation", "continuation", "continuation"]
    assert session.said.strip() == "The tests pass."
    tools = {tool["function"]["name"] for tool in session.record.tools}
    assert {"Agent", "Bash", "Edit", "Read", "Write"} <= tools
    assert not {"WebFetch", "WebSearch"} & tools


async def test_a_busy_model_is_asked_again_and_a_cut_answer_is_a_retry_that_is_not_trained_on(played):
    session = await played(kit.repairs(busy=True), cut={4})
    assert session.num_cut == 1
    assert sorted(session.edges) == ["continuation", "continuation", "continuation", "retry", "root"]
    assert session.record.failure is None


async def test_calls_that_it_tidies_before_it_runs_them_break_no_prefix(played):
    session = await played(kit.tidied())
    assert session.edges == ["root", *["continuation"] * 8]
    ran = [
        call["function"]["arguments"] for message in session.record.messages for call in message.get("tool_calls", ())
    ]
    assert '"limit": "3"' in ran[0]


async def test_each_sub_agent_is_a_branch_that_is_called_and_returns(played):
    session = await played(kit.delegates())
    nodes = session.trajectory.nodes
    agents = [node for node in nodes if node.edge is Edge.SUBAGENT_CALL]
    assert len(agents) == 3
    assert {node.link for node in agents} <= {node.node_id for node in nodes if node.edge is not Edge.SUBAGENT_CALL}
    assert [node.edge for node in nodes].count(Edge.SUBAGENT_RETURN) == 2
    assert session.prefix_breaks == 0


@pytest.mark.parametrize(
    "options",
    [{"env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "112000"}}, {"context_length": 110_000}],
    ids=["own", "overflow"],
)
async def test_it_goes_on_from_a_summary_that_the_policy_wrote(played, options):
    session = await played(kit.fills_up(size=6000), **options)
    nodes = session.trajectory.nodes
    (compaction,) = [node for node in nodes if node.edge is Edge.COMPACTION]
    assert nodes[compaction.link].edge is Edge.CONTINUATION
    assert session.prefix_breaks == 0


async def test_a_limit_ends_it_and_what_it_left_is_graded(tmp_path):
    async with stage(kit.HARNESS, tmp_path) as on_stage:
        session = await on_stage.play(kit.repairs(), env=kit.WINDOW, max_calls=2)
    assert (session.output.exit_code, len(session.edges), session.record.truncated) == (1, 2, "calls")
    assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.TRUNCATED, 1.0)
