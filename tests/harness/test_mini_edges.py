# pyright: basic
"""What the calls of the mini harness are taken for."""

import pytest
from mini_kit import SUBMIT, play, shell

from etude.algorithm.branches import branches_of


@pytest.mark.parametrize(("summary", "reason"), [("blue", "summary_in_prompt"), ("", "mini_summary")])
async def test_a_chain_of_summaries_is_one_compaction_after_the_other_and_breaks_no_prefix(tmp_path, summary, reason):
    (tmp_path / "page").write_text("x" * 300)
    answers = [shell("cat page"), summary, shell("cat page"), summary, SUBMIT]
    _, transcript, record = await play(answers, tmp_path, instruction="Read.", compact_at=100)
    assert [(node.edge.value, node.reason, node.link) for node in record.nodes] == [
        ("root", "first_call", None),
        ("continuation", "messages_extend", None),
        ("compaction", reason, 1),
        ("continuation", "messages_extend", None),
        ("compaction", reason, 3),
    ], transcript
    assert record.metrics["gateway/prefix_break_rate"] == 0.0
    found = branches_of(record.nodes)
    assert sorted(node_id for branch in found.branches for node_id in branch.owned) == [0, 1, 2, 3, 4]
