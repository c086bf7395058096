# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
"""Random harnesses against a session: they go on, go back, ask again, rewrite, change tools and ask twice at once."""

import asyncio
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.conversation import Conversation, message_key
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.sessions import ModelCall, Session
from etude.interfaces import SessionSpec
from etude.types import Edge, SamplingParams

TOKENIZER = byte_tokenizer()
TOOLS = ((), ({"type": "function", "function": {"name": "shell"}},))
ANSWERS = ["ok", "ok ", " ok", '<tool_call>{"name": "shell", "arguments": {"a": 1,"b":  2}}</tool_call>', "<tool_call>"]

moves = st.lists(
    st.tuples(
        st.sampled_from(["on", "on", "on", "back", "again", "rewrite", "tools", "both"]),
        st.integers(0, 30),
        st.sampled_from(["go", "ab", "\n", "é"]),
    ),
    min_size=1,
    max_size=12,
)


class RandomSampler:
    """Draws texts and broken bytes, sometimes without an end; keeps every sequence that it saw and drew."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seen = []

    async def sample(self, request):
        drawn = TOKENIZER.encode(self.random.choice(ANSWERS)).ids
        if self.random.random() < 0.3:
            drawn = [self.random.randrange(257) for _ in range(self.random.randrange(1, 6))]
        if self.random.random() < 0.8:
            drawn.append(TOKENIZER.token_to_id("<|im_end|>"))
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        completion = await ScriptedSampler([drawn], tokenizer=TOKENIZER).sample(request)
        self.seen.append((request.prompt_ids, completion.token_ids))
        return completion

    async def status(self):
        return []


class Extendable(ChatMLRenderer):
    """Gives up extending at some texts, as families do whose templates look back."""

    def extend(self, messages, *, finished):
        return (
            None
            if any(message["content"] == "é" for message in messages)
            else super().extend(messages, finished=finished)
        )


def respell(message):
    """Return an assistant message as a careless harness gives it back."""
    calls = [
        {
            **call,
            "id": "new",
            "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))},
        }
        for call in message.get("tool_calls", ())
    ]
    return {
        "role": "assistant",
        "content": (message["content"] or "").strip(),
        **({"tool_calls": calls} if calls else {}),
    }


async def play(seed, script):
    sampler = RandomSampler(seed)
    session = Session(
        SessionSpec(
            session_id="s", purpose="train", seed=0, params=SamplingParams(), max_calls=100, max_session_tokens=10_000
        ),
        sampler=sampler,
        renderer=Extendable(TOKENIZER, "chatml-compact"),
        context_length=10_000,
        call_timeout_s=10.0,
    )
    request, tools = [{"role": "user", "content": "start"}], TOOLS[0]
    ended = []

    async def ask(messages):
        call = ModelCall(conversation=Conversation(messages=tuple(messages), tools=tools), body_key=repr(messages))
        answer = await session.submit(call)
        ended.append([*messages, respell(answer.message)])

    await ask(request)
    for move, choice, text in script:
        history = ended[choice % len(ended)] if move == "back" else ended[-1]
        tail = {"role": ("user", "tool")[choice % 2], "content": text}
        if move == "tools":
            tools = TOOLS[1 - TOOLS.index(tools)]
        if move == "rewrite":
            history = [{**history[0], "content": f"start {choice}"}, *history[1:]]
        if move == "again":
            await ask(ended[choice % len(ended)][:-1])
        elif move == "both":
            await asyncio.gather(ask([*history, tail]), ask([*history, tail]))
        else:
            await ask([*history, tail])
    return sampler, await session.close()


def path(nodes, node):
    return [node] if node.parent is None else [*path(nodes, nodes[node.parent]), node]


@given(seed=st.integers(0, 1000), script=moves)
def test_a_branch_is_exactly_what_the_sampler_saw_and_drew(seed, script):
    sampler, record = asyncio.run(play(seed, script))
    assert len(record.nodes) == len(sampler.seen) == record.num_calls
    for node, (prompt_ids, drawn) in zip(record.nodes, sampler.seen, strict=True):
        branch = path(record.nodes, node)
        tokens = [token for part in branch for token in (*part.prompt_ids, *part.completion.token_ids)]
        assert tokens == [*prompt_ids, *drawn]
        rows = [part.completion.experts for part in branch]
        ends = [part.start + part.num_positions for part in rows]
        assert [part.start for part in rows] == [0, *ends[:-1]]
        assert ends[-1] == len(tokens) - 1


@given(seed=st.integers(0, 1000), script=moves)
def test_each_drawn_token_belongs_to_exactly_one_sample(seed, script):
    sampler, record = asyncio.run(play(seed, script))
    parents = {node.parent for node in record.nodes}
    owned, trainable = set(), 0
    for leaf in (node for node in record.nodes if node.node_id not in parents):
        fresh = [part for part in path(record.nodes, leaf) if part.node_id not in owned]
        owned |= {part.node_id for part in fresh}
        trainable += sum(len(part.completion.token_ids) for part in fresh)
    assert trainable == sum(len(drawn) for _, drawn in sampler.seen)
    assert record.metrics["gateway/tokens_drawn"] == trainable


@given(seed=st.integers(0, 1000), script=moves)
def test_each_edge_says_what_its_node_shares_with_the_others(seed, script):
    _, record = asyncio.run(play(seed, script))
    for node in record.nodes:
        earlier = record.nodes[: node.node_id]
        if node.edge is Edge.ROOT:
            assert node.node_id == 0
        if node.edge is Edge.CONTINUATION:
            assert node.parent is not None
            assert node.parent < node.node_id
        if node.edge is Edge.RETRY:
            assert any((twin.parent, twin.prompt_ids) == (node.parent, node.prompt_ids) for twin in earlier)
        if node.edge in (Edge.REWRITE, Edge.TOOLS_CHANGED, Edge.UNEXTENDABLE):
            assert node.parent is None
            assert earlier


def test_what_harnesses_do_to_answers_does_not_make_them_other_messages():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"b": 1, "a": [true]}'}}
    respelled = {"id": "2", "function": {"name": "f", "arguments": '{"a":[true],"b":1}'}}
    answer = {"role": "assistant", "content": " x\n", "tool_calls": [call], "reasoning_content": "r"}
    assert message_key(answer) == message_key({"role": "assistant", "content": "x", "tool_calls": [respelled]})
    assert message_key(answer) != message_key({"role": "assistant", "content": "x"})
    assert message_key({"role": "tool", "content": "x"}) != message_key({"role": "tool", "content": "x\n"})
