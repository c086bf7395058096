# pyright: basic
"""The tree of a session, as people read it."""

from hypothesis import given
from hypothesis import strategies as st

from etude.dashboard.session_tree import session_tree_text
from etude.rollout.atif import Call

GOLDEN = """\
11 calls
├── 0 auxiliary (title)  120 in, 9 out  v3
├── 1 root (first_call)  1029 in, 289 out  v3  Agent, Agent
│   ├── 2 subagent_call -> 1 (prompt_of_tool_call)  923 in, 198 out  v3  Read, Bash
│   │   └── 5 continuation (messages_extend)  276 in, 70 out  v3-4
│   ├── 3 subagent_call -> 1 (prompt_of_tool_call)  951 in, 198 out  v3
│   ├── 4 subagent_return -> 5 (answer_in_tool_result)  347 in, 160 out  v4  Edit
│   │   └── 6 continuation (messages_extend)  116 in, 512 out  v4  length
│   ├── 7 retry -> 6 (same_prompt)  116 in, 16 out  v4
│   └── 8 continuation (messages_extend)  90 in, 159 out  v4
└── 9 compaction -> 8 (summary_in_prompt)  1300 in, 93 out  v5  a\\x1bb
    └── 10 continuation (messages_extend)  155 in, 5 out  v5
"""


def call(node, parent, edge, reason, tokens, versions, link=None, tools=(), finish="stop"):
    return Call(
        node=node,
        parent=parent,
        edge=edge,
        reason=reason,
        link=link,
        prompt_tokens=tokens[0],
        drawn_tokens=tokens[1],
        versions=versions,
        tools=tools,
        finish_reason=finish,
    )


CALLS = (
    call(0, None, "auxiliary", "title", (120, 9), (3, 3)),
    call(1, None, "root", "first_call", (1029, 289), (3, 3), tools=("Agent", "Agent")),
    call(2, None, "subagent_call", "prompt_of_tool_call", (923, 198), (3, 3), 1, ("Read", "Bash")),
    call(3, None, "subagent_call", "prompt_of_tool_call", (951, 198), (3, 3), 1),
    call(5, 2, "continuation", "messages_extend", (276, 70), (3, 4)),
    call(4, 1, "subagent_return", "answer_in_tool_result", (347, 160), (4, 4), 5, ("Edit",)),
    call(6, 4, "continuation", "messages_extend", (116, 512), (4, 4), finish="length"),
    call(7, 4, "retry", "same_prompt", (116, 16), (4, 4), 6),
    call(8, 7, "continuation", "messages_extend", (90, 159), (4, 4)),
    call(9, None, "compaction", "summary_in_prompt", (1300, 93), (5, 5), 8, ("a\x1bb",)),
    call(10, 9, "continuation", "messages_extend", (155, 5), (5, 5)),
)


def test_conversations_stand_in_order_and_sub_agents_below_who_started_them():
    assert session_tree_text(CALLS) == GOLDEN


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(-1, 30), st.booleans()), max_size=30))
def test_each_call_of_any_tree_is_told_once(shapes):
    calls = [
        Call(
            node=node,
            parent=parent if 0 <= parent < node else None,
            edge="subagent_call" if is_agent else "continuation",
            link=None if link < 0 else link,
            prompt_tokens=1,
            drawn_tokens=1,
        )
        for node, (parent, link, is_agent) in enumerate(shapes)
    ]
    lines = session_tree_text(calls).splitlines()[1:]
    assert sorted(int(line.lstrip("│├└─ ").split()[0]) for line in lines) == list(range(len(calls)))


def test_a_conversation_of_many_calls_stays_as_wide_as_one_of_few():
    calls = [call(n, n - 1 if n else None, "continuation", "", (1, 1), None) for n in range(400)]
    assert max(map(len, session_tree_text(calls).splitlines())) < 60
