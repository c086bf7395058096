# pyright: basic
"""What single calls are, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from session_kit import TOOLS, Harness, Talk

from etude.config import EdgeRule
from etude.gateway.edges import Relations, Told
from etude.gateway.quotes import Quoting, blank_free, quotable
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.types import Edge

LONG = "The fault is in line seven of the parser."


async def told(harness):
    """Return edge, reason and link of each call, by number."""
    record = await harness.session.close()
    nodes = sorted(record.nodes, key=lambda node: node.node_id)
    return [(node.edge.value, node.reason, node.link) for node in nodes]


async def say(harness, talk, text, answer=None, **hints):
    """Go on with a conversation, whatever that makes it."""
    return await harness.ask(talk, [{"role": "user", "content": text}], "", answer=answer, **hints)


async def test_a_title_that_is_asked_for_first_is_not_the_conversation_of_the_task():
    harness = Harness()
    await say(harness, Talk("Generate a short title for this session.", tools=()), "fix it now", model="small")
    await say(harness, harness.main, "fix it now, please")
    await harness.go_on()
    assert [edge for edge, _, _ in await told(harness)] == ["auxiliary", "root", "continuation"]


async def test_a_first_message_that_a_title_was_made_of_does_not_make_the_task_a_rewrite():
    harness = Harness()
    await say(harness, Talk("Generate a short title for this session.", tools=()), LONG)
    await say(harness, harness.main, LONG)
    assert await told(harness) == [("auxiliary", "title", None), ("root", "own_conversation", None)]


@pytest.mark.parametrize(
    ("talk", "hints", "reason"),
    [
        (Talk("One.", tools=()), {"max_tokens": 1}, "quota_ping"),
        (Talk("Two."), {"max_tokens": 20}, "small_answer"),
        (Talk("Three.", tools=()), {}, "no_tools"),
        (Talk("Four."), {"model": "small"}, "other_model"),
        (Talk("An agent that tells if this is a new conversation topic."), {}, "topic"),
    ],
)
async def test_small_talk_beside_the_task_is_auxiliary(talk, hints, reason):
    harness = Harness()
    await harness.start()
    await say(harness, Talk(talk.system, tools=talk.tools), "any question at all", **hints)
    await harness.go_on()
    assert (await told(harness))[1] == ("auxiliary", reason, None)


async def test_small_talk_that_goes_on_is_a_conversation_of_its_own():
    harness = Harness()
    await harness.start()
    other = Talk("You plan.", tools=())
    await say(harness, other, "what first?")
    await say(harness, other, "and then?")
    assert (await told(harness))[1:] == [
        ("root", "own_system_prompt", None),
        ("continuation", "messages_extend", None),
    ]


async def test_a_rule_of_the_harness_is_asked_before_the_built_in_ones():
    rules = (EdgeRule(name="planner", edge="root", system="^You plan", single=True),)
    harness = Harness(rules=rules)
    await harness.start()
    await say(harness, Talk("You plan.", tools=()), "what first?")
    assert (await told(harness))[1] == ("root", "own_system_prompt", None)


async def test_the_last_message_can_make_a_continuation_auxiliary():
    rules = (EdgeRule(name="suggestion", edge="auxiliary", last_user="^SUGGEST"),)
    harness = Harness(rules=rules)
    await harness.start()
    kept = list(harness.main.messages)
    await say(harness, harness.main, "SUGGEST what to say next")
    harness.main.messages = kept
    await harness.go_on()
    assert [edge for edge, _, _ in await told(harness)] == ["root", "auxiliary", "continuation"]


async def test_a_declared_rewrite_breaks_no_prefix():
    rules = (EdgeRule(name="cleared", edge="rewrite", anywhere=r"\[cleared\]"),)
    harness = Harness(rules=rules)
    await harness.start()
    await harness.go_on()
    harness.main.messages[0] = {"role": "user", "content": "[cleared]"}
    await say(harness, harness.main, "go on")
    record = await harness.session.close()
    assert (record.nodes[2].edge.value, record.nodes[2].reason) == ("rewrite", "cleared")
    assert record.metrics["gateway/prefix_break_rate"] == 0.0


async def test_a_declared_compaction_needs_no_quote():
    rules = (EdgeRule(name="resumed", edge="compaction", first_user="^This session goes on"),)
    harness = Harness(rules=rules)
    await harness.start()
    await harness.go_on()
    await say(harness, Talk(harness.main.system), "This session goes on from notes.")
    assert (await told(harness))[2] == ("compaction", "resumed", 1)


@pytest.mark.parametrize("wrapped", ["Notes:\n3 7", "<summary>3 7</summary>", "3 7", "Notes:\n\n  3   7  \n\nGo on."])
async def test_a_short_summary_is_known_as_a_line_of_its_own(wrapped):
    harness = Harness()
    await harness.start()
    await say(harness, harness.main, "Write down what you need to go on, nothing else.", answer="3 7")
    await say(harness, Talk(harness.main.system), wrapped)
    assert (await told(harness))[2] == ("compaction", "summary_in_prompt", 1)


async def test_a_summary_may_be_in_a_system_prompt_and_an_answer_told_to_another_agent_is_none():
    harness = Harness()
    await harness.start()
    await say(harness, harness.main, "Write down what you need to go on, nothing else.", answer=LONG)
    await say(harness, Talk(f"You repair code. So far: {LONG}"), "Go on.")
    await say(harness, Talk("You review."), f"Is this right? {LONG}")
    assert (await told(harness))[2:] == [
        ("compaction", "summary_in_prompt", 1),
        ("root", "own_system_prompt", None),
    ]


async def test_the_part_of_an_answer_that_is_marked_as_its_summary_is_enough():
    harness = Harness()
    await harness.start()
    answer = f"<analysis>hm, hm, hm</analysis>\n<summary>\n{LONG}\n\nIt was not fixed.\n</summary>"
    await say(harness, harness.main, "Summarise.", answer=answer)
    await say(harness, Talk(harness.main.system), f"Summary:\n{LONG}\nIt was not fixed.")
    assert (await told(harness))[2] == ("compaction", "summary_in_prompt", 1)


async def test_a_harness_that_repeats_all_that_was_said_in_one_message_does_not_compact():
    harness = Harness()
    await harness.start()
    told_so_far = f"{harness.main.messages[0]['content']}\n{harness.main.messages[1]['content']}\nIt printed 3.\nGo on."
    await say(harness, Talk(harness.main.system), told_so_far)
    assert (await told(harness))[1] == ("rewrite", "history_changed", 0)


async def test_a_summary_that_is_said_twice_is_two_summaries_and_a_repetition_of_its_prompt_a_retry():
    harness = Harness()
    await harness.start()
    for _ in range(2):
        await say(harness, harness.main, harness.text("write it down"), answer=LONG)
        harness.main.messages = []
        await say(harness, harness.main, f"You wrote:\n{LONG}")
    harness.main.messages = []
    await say(harness, harness.main, f"You wrote:\n{LONG}")
    assert [(edge, link) for edge, _, link in (await told(harness))[1:]] == [
        ("continuation", None),
        ("compaction", 1),
        ("continuation", None),
        ("compaction", 3),
        ("retry", 4),
    ]


async def test_a_harness_can_say_whose_sub_agent_asks():
    harness = Harness()
    await harness.start()
    call = '<tool_call>{"name": "agent", "arguments": {"file": "a.py"}}</tool_call>'
    message = await say(harness, harness.main, "delegate", answer=call)
    await say(harness, Talk(harness.main.system), "review", parent=message["tool_calls"][0]["id"])
    assert (await told(harness))[2] == ("subagent_call", "header", 1)


async def test_an_own_prompt_while_a_tool_has_not_answered_is_taken_for_a_sub_agent():
    harness = Harness()
    await harness.start()
    call = '<tool_call>{"name": "agent", "arguments": {"file": "a.py"}}</tool_call>'
    await say(harness, harness.main, "delegate", answer=call)
    await say(harness, Talk("You review."), "look at the file")
    assert (await told(harness))[2] == ("subagent_call", "tool_call_open", 1)


async def test_an_agent_that_nothing_showed_is_known_by_its_answer():
    harness = Harness()
    await harness.start()
    await say(harness, Talk("You review."), "look at the file", answer=LONG)
    await harness.ask(harness.main, [{"role": "user", "content": f"<notice>{LONG}</notice>"}], "")
    assert (await told(harness))[1:] == [
        ("subagent_call", "answer_returned", 0),
        ("subagent_return", "answer_in_tool_result", 1),
    ]


async def test_agents_that_are_asked_the_same_at_once_are_each_started_by_a_tool_call_of_their_own():
    harness = Harness()
    await harness.start()
    call = f'<tool_call>{{"name": "agent", "arguments": {{"prompt": "{LONG}"}}}}</tool_call>'
    await say(harness, harness.main, "delegate", answer=f"{call}\n{call}")
    for n in range(3):
        await say(harness, Talk(f"You are helper {n}.", tools=TOOLS[:1]), LONG)
    reasons = [(edge, reason) for edge, reason, _ in (await told(harness))[2:]]
    assert reasons[:2] == [("subagent_call", "prompt_of_tool_call")] * 2
    assert reasons[2] != ("subagent_call", "prompt_of_tool_call")


async def test_another_system_prompt_over_the_same_messages_is_a_rewrite():
    harness = Harness()
    await harness.start()
    await say(harness, Talk("The time is 12:01.", messages=harness.main.messages), "go on")
    assert (await told(harness))[1] == ("rewrite", "system_prompt_changed", 0)


class Whole(ChatMLRenderer):
    """Cannot extend anything, but renders the same each time."""

    def extend(self, messages, *, finished):
        return None


async def test_what_cannot_be_extended_is_still_a_continuation_if_its_tokens_are():
    harness = Harness(renderer=Whole)
    await harness.start()
    await harness.go_on()
    assert (await told(harness))[1] == ("continuation", "tokens_extend", None)


async def test_a_parent_that_is_answered_after_its_child_gets_it_and_comes_before_it():
    harness = Harness()
    await harness.start()
    await harness.run_ahead()
    await harness.go_on()
    record = await harness.session.close()
    assert [(node.node_id, node.parent, node.reason) for node in record.nodes] == [
        (0, None, "first_call"),
        (2, 0, "messages_extend"),
        (1, 2, "late_parent"),
        (3, 1, "messages_extend"),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"edge": "auxiliary", "system": "("}, "no regular expression"),
        ({"edge": "compaction", "single": True}, "may only look at messages"),
        ({"edge": "continuation"}, "edge"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        EdgeRule(name="rule", **fields)


@given(st.text(max_size=60), st.text(max_size=30), st.text(max_size=30))
def test_a_text_quotes_what_stands_in_it_on_lines_of_its_own(text, before, after):
    if blank_free(text):
        assert Quoting(f"{before}\n{text}\n{after}").quotes(text)
    assert not Quoting(before).quotes("")


def test_a_short_text_within_a_line_is_no_quote():
    assert not Quoting("all is ok here").quotes("ok")
    assert Quoting("all of this is here: " + LONG.replace(" ", "\n")).quotes(LONG)
    assert quotable("a<summary>b</summary>c") == ("a<summary>b</summary>c", "b")


def test_a_root_that_is_moved_below_a_call_of_its_own_agent_stays_the_root():
    relations = Relations(())
    answer = {"role": "assistant", "content": "done"}
    for told, parent in (
        (Told(edge=Edge.ROOT, reason="first"), None),
        (Told(edge=Edge.CONTINUATION, reason="next"), 0),
    ):
        relations.learn(told, parent=parent, answer=answer, asked=0, length=10, call_id="")
    relations.move(0, 1)
    assert [relations.agent(node_id) for node_id in (0, 1)] == [0, 0]
