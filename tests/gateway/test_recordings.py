# pyright: basic
"""What Claude Code and Codex really ask, without them."""

import pytest
from recording_kit import NAMES, load, replay

from etude.types import Edge

PARENTS = {
    "claude-code-busy": [None, 0, 1, 2, 2],
    "claude-code-delegates": [None, None, None, 2, 1, 0, None, 5, 6, 7, 9, 10],
    "claude-code-overflow": [None, 0, 1, 2, 3, 4, 3, None, 7, 8, 9],
    "claude-code-search": [None, None, 0, 2, 3],
    "claude-code-tidied": [None, 0, 1, 2, 3, 4, 5, 6, 7],
    "claude-code-window": [None, 0, 1, 2, 2, None, 5, 6, 7],
    "codex-busy": [None, 0, 1, 1, 3],
    "codex-delegates": [None, None, 0, None, 3, 1, 2, 6, 7, 8],
    "codex-window": [None, 0, 1, 2, None, None, 5, 6],
}


@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_session_has_a_branch_for_each_agent_and_each_summary_and_no_other(serve, name):
    record = await replay(load(name), serve)
    assert [node.parent for node in record.nodes] == PARENTS[name]
    assert (record.failure, Edge.UNEXTENDABLE in [node.edge for node in record.nodes]) == (None, False)
