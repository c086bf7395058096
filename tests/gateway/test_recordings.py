# pyright: basic
"""What Claude Code and Codex really ask, without them."""

import pytest
from recording_kit import NAMES, load, replay, retold
from renderer_kit import OPENING, RENDERERS

from etude.types import Edge

BRANCHES = {
    "claude-code-busy": ([None, 0, 1, 2, 2], {4: ("retry", 3)}),
    "claude-code-delegates": (
        [None, None, None, 2, 1, 0, None, 5, 6, 7, 9, 10],
        {
            1: ("subagent_call", 0),
            2: ("subagent_call", 0),
            5: ("subagent_return", 4),
            6: ("subagent_call", 5),
            9: ("subagent_return", 8),
        },
    ),
    "claude-code-overflow": ([None, 0, 1, 2, 3, 4, 3, None, 7, 8, 9], {7: ("compaction", 6)}),
    "claude-code-search": ([None, None, 0, 2, 3], {1: ("subagent_call", 0), 2: ("subagent_return", 1)}),
    "claude-code-tidied": ([None, 0, 1, 2, 3, 4, 5, 6, 7], {}),
    "claude-code-window": ([None, 0, 1, 2, 2, None, 5, 6, 7], {5: ("compaction", 4)}),
    "codex-busy": ([None, 0, 1, 1, 3], {3: ("retry", 2)}),
    "codex-delegates": (
        [None, None, 0, None, 1, 3, 2, 6, 7, 8],
        {
            1: ("subagent_call", 0),
            3: ("subagent_call", 0),
            6: ("subagent_return", 4),
            7: ("subagent_return", 5),
        },
    ),
    "codex-window": ([None, 0, 1, 2, None, None, 5, 6], {4: ("tools_changed", 3), 5: ("compaction", 4)}),
}
"""By recording: the parents, and edge and link of the calls that neither begin the session nor continue another one."""


@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_session_has_a_branch_for_each_agent_and_each_summary_and_no_other(serve, name):
    record = await replay(load(name), serve)
    parents, edges = BRANCHES[name]
    expected = [edges.get(n, ("continuation" if n else "root", None)) for n in range(len(parents))]
    assert [node.parent for node in record.nodes] == parents
    assert [(node.edge.value, node.link) for node in record.nodes] == expected
    assert record.failure is None


@pytest.mark.parametrize("family", RENDERERS)
async def test_agents_and_sub_agents_are_played_by_every_family(serve, family):
    name, renderer = "claude-code-delegates", RENDERERS[family]
    record = await replay(retold(load(name), renderer), serve, renderer=renderer)
    assert (len(record.nodes), record.failure) == (len(BRANCHES[name][0]), None)
    # A late word of the system moves to DeepSeek's beginning; a reasoning that was begun and not written goes.
    if not family.startswith("deepseek") and family not in OPENING:
        assert [node.parent for node in record.nodes] == BRANCHES[name][0]
        assert Edge.UNEXTENDABLE not in [node.edge for node in record.nodes]
