# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
"""One harness, said in three dialects: the same tokens, the same tree, each drawn token trained once."""

import asyncio
import json
import random
from collections import Counter
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithm.branches import branches_of
from etude.gateway.dialects.chat import CHAT
from etude.gateway.dialects.messages import MESSAGES
from etude.gateway.dialects.responses import RESPONSES
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.sessions import ModelCall, Session
from etude.interfaces import SessionSpec
from etude.types import Edge, SamplingParams

TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>{{"name": "shell", "arguments": {}}}</tool_call>'
TOOL_SETS = ((), (("shell", "Run it.", {"type": "object"}),), (("shell", "Run it.", {}), ("read", "Read.", {})))
TEXTS = ["ok", " ok\n", "", f"{THOUGHT}so", THOUGHT, "<tool_call>{oops</tool_call>", "é\u2028\x00", "call_"]
ARGUMENTS = [
    "{}",
    '{"a": 1,"b":  [2.0, 1e3]}',
    '{"a": 9007199254740993}',
    '{"a": "\\u00e9\\"", "a": null}',
    '{"é": {"n": -0.0}}',
]

calls = st.builds(
    lambda thought, text, arguments: thought + text + "".join(CALL.format(each) for each in arguments),
    st.sampled_from(["", THOUGHT]),
    st.sampled_from(["", "I look. "]),
    st.lists(st.sampled_from(ARGUMENTS), min_size=1, max_size=3),
)
bytes_without_sense = st.lists(st.integers(0, 256), min_size=1, max_size=6)
answers = st.lists(st.sampled_from(TEXTS) | calls | bytes_without_sense, min_size=2, max_size=8)
moves = st.lists(
    st.tuples(
        st.sampled_from(["on", "on", "on", "back", "again", "rewrite", "tools", "both", "invent"]),
        st.integers(0, 30),
        st.sampled_from(["go", "ab", "\n", "é", ""]),
    ),
    min_size=1,
    max_size=10,
)


# A history is a list of ("system" | "user", text), ("results", [(id, text)]) and ("answer", (reasoning, text, calls))
# with calls as (id, name, arguments as JSON text).


class Chat:
    """A harness of Chat Completions."""

    dialect = CHAT

    def body(self, history, tools):
        messages = [message for turn in history for message in self.turn(*turn)]
        functions = [{"name": name, "description": text, "parameters": schema} for name, text, schema in tools]
        return {"messages": messages, "tools": [{"type": "function", "function": function} for function in functions]}

    def turn(self, kind, said):
        if kind == "results":
            return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in said]
        if kind != "answer":
            return [{"role": kind, "content": said}]
        reasoning, text, called = said
        message = {"role": "assistant", "content": text}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if called:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in called
            ]
        return [message]

    def answer(self, body):
        message = body["choices"][0]["message"]
        called = [(call["id"], *call["function"].values()) for call in message.get("tool_calls", ())]
        return message.get("reasoning_content"), message["content"], called


class Messages:
    """A harness of Messages, which knows arguments as values and so respells them."""

    dialect = MESSAGES

    def body(self, history, tools):
        system = [{"type": "text", "text": said} for kind, said in history[:1] if kind == "system"]
        messages = [self.turn(*turn) for turn in history[len(system) :]]
        shown = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in tools]
        return {"system": system, "messages": messages, "tools": shown}

    def turn(self, kind, said):
        if kind == "results":
            blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in said]
            return {"role": "user", "content": blocks}
        if kind != "answer":
            return {"role": kind, "content": [{"type": "text", "text": said}]}
        reasoning, text, called = said
        blocks = [] if reasoning is None else [{"type": "thinking", "thinking": reasoning, "signature": "s"}]
        blocks += [{"type": "text", "text": text}] if text else []
        for call_id, name, arguments in called:
            blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)})
        return {"role": "assistant", "content": blocks}

    def answer(self, body):
        texts, reasoning, called = "", None, []
        for block in body["content"]:
            if block["type"] == "thinking":
                reasoning = block["thinking"]
            elif block["type"] == "text":
                texts += block["text"]
            else:
                called.append((block["id"], block["name"], json.dumps(block["input"])))
        return reasoning, texts, called


class Responses:
    """A harness of Responses; `apart` sends each result right behind its call."""

    dialect = RESPONSES

    def __init__(self, *, apart=False):
        self.apart = apart

    def body(self, history, tools):
        items = [item for turn in history for item in self.turn(*turn)]
        if self.apart:
            items = list(self.interleaved(items))
        shown = [
            {"type": "function", "name": name, "description": text, "parameters": schema}
            for name, text, schema in tools
        ]
        return {"input": items, "tools": shown}

    def interleaved(self, items):
        results = {item["call_id"]: item for item in items if item.get("type") == "function_call_output"}
        shown = set()
        for item in items:
            if item.get("type") != "function_call_output" or item["call_id"] not in shown:
                yield item
            if item.get("type") == "function_call" and item["call_id"] in results:
                shown.add(item["call_id"])
                yield results[item["call_id"]]

    def turn(self, kind, said):
        if kind == "results":
            return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in said]
        if kind != "answer":
            return [{"role": kind, "content": [{"type": "input_text", "text": said}]}]
        reasoning, text, called = said
        items = []
        if reasoning is not None:
            content = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": content, "encrypted_content": "s"})
        if text or not called:
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
        for call_id, name, arguments in called:
            items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
        return items

    def answer(self, body):
        texts, reasoning, called = "", None, []
        for item in body["output"]:
            if item["type"] == "reasoning":
                reasoning = item["content"][0]["text"]
            elif item["type"] == "message":
                texts += item["content"][0]["text"]
            else:
                called.append((item["call_id"], item["name"], item["arguments"]))
        return reasoning, texts, called


class Draws:
    """Draws the scripted answers in turn and forever, some without an end."""

    def __init__(self, script):
        self.script, self.count, self.drawn = script, 0, 0

    async def sample(self, request):
        answer = self.script[self.count % len(self.script)]
        self.count += 1
        ids = TOKENIZER.encode(answer).ids if isinstance(answer, str) else answer
        ids = [*ids, END] if isinstance(answer, str) or len(ids) % 2 else ids
        completion = await ScriptedSampler([ids], tokenizer=TOKENIZER).sample(request)
        self.drawn += len(completion.token_ids)
        return completion


async def play(speaker_of, script, answers, *, keeps_reasoning=True):
    """Return the record of a session in which call n is spoken by `speaker_of(n)`, and how many tokens were drawn."""
    sampler = Draws(answers)
    session = Session(
        SessionSpec(
            session_id="s", purpose="train", seed=0, params=SamplingParams(), max_calls=100, max_session_tokens=30_000
        ),
        sampler=sampler,
        renderer=ChatMLRenderer(TOKENIZER),
        context_length=30_000,
        call_timeout_s=10.0,
    )
    ended, spoken = [], 0

    async def ask(history, tools):
        nonlocal spoken
        speaker = speaker_of(spoken)
        spoken += 1
        asked = speaker.dialect.parse(json.dumps(speaker.body(history, tools)).encode())
        call = ModelCall(conversation=asked.conversation, body_key=str(spoken))
        answer = await session.submit(call)
        reasoning, text, called = speaker.answer(json.loads(speaker.dialect.body(answer, asked)))
        said = (reasoning if keeps_reasoning else None, text or "", called)
        ended.append([*history, ("answer", said)])

    def follow(history, text):
        """Return a history with the results of its last calls, or with what the user says next."""
        kind, said = history[-1]
        if kind == "answer" and said[2]:
            history = [
                *history,
                ("results", [(call_id, f"{text}{index}") for index, (call_id, *_) in enumerate(said[2])]),
            ]
            return [*history, ("user", text)] if text == "go" else history
        return [*history, ("user", text)]

    tools = TOOL_SETS[1]
    await ask([("system", "be brief"), ("user", "start")], tools)
    for move, choice, text in script:
        history = ended[choice % len(ended)] if move in ("back", "again") else ended[-1]
        if move == "tools":
            tools = TOOL_SETS[choice % len(TOOL_SETS)]
        elif move == "rewrite":
            history = [history[0], ("user", f"start {choice}"), *history[2:]]
        elif move == "invent":
            history = [
                *history[:-1],
                ("answer", ("why", "never said", [(f"call_{spoken}", "shell", '{"a": [1, "b"]}')])),
            ]
        if move == "again":
            await ask(history[:-1], tools)
        elif move == "both":
            await asyncio.gather(*[ask(follow(history, text), tools) for _ in range(2)])
        else:
            await ask(follow(history, text), tools)
    return await session.close(), sampler.drawn


def shape(record):
    return [(node.parent, node.edge, node.prompt_ids, node.completion.token_ids) for node in record.nodes]


def always(speaker):
    return lambda _: speaker


@settings(max_examples=25)
@given(script=moves, answers=answers, keeps_reasoning=st.booleans(), seed=st.integers(0, 100))
def test_a_conversation_is_the_same_tree_of_the_same_tokens_in_each_dialect(script, answers, keeps_reasoning, seed):
    speakers = [Chat(), Messages(), Responses(), Responses(apart=True)]
    dice = random.Random(seed)
    mixed = partial(lambda choices, n: choices[n], [dice.choice(speakers) for _ in range(40)])
    records = [
        asyncio.run(play(speaker_of, script, answers, keeps_reasoning=keeps_reasoning))[0]
        for speaker_of in (*map(always, speakers), mixed)
    ]
    for record in records:
        assert record.failure is None
        assert shape(record) == shape(records[0])


@given(answers=answers, keeps_reasoning=st.booleans(), turns=st.integers(1, 8))
def test_a_loop_of_tool_calls_extends_its_tokens_and_never_breaks(answers, keeps_reasoning, turns):
    script = [("on", 0, text) for text in ["go", "ab", "\n", ""][: max(1, turns % 5)] * 2][:turns]
    for speaker in (Chat(), Messages(), Responses(), Responses(apart=True)):
        record, _ = asyncio.run(play(always(speaker), script, answers, keeps_reasoning=keeps_reasoning))
        assert [node.edge for node in record.nodes] == [Edge.ROOT, *[Edge.CONTINUATION] * len(script)]
        assert [node.parent for node in record.nodes] == [None, *range(len(script))]


@given(script=moves, answers=answers, seed=st.integers(0, 100))
def test_each_drawn_token_is_trained_once_or_superseded(script, answers, seed):
    dice = random.Random(seed)
    choices = [dice.choice([Chat(), Messages(), Responses()]) for _ in range(40)]
    record, drawn = asyncio.run(play(lambda n: choices[n], script, answers))
    tree = branches_of(record.nodes)
    times = Counter(node_id for branch in tree.branches for node_id in branch.owned)
    times.update(node.node_id for node in tree.superseded)
    assert times == Counter(node.node_id for node in record.nodes)
    assert all(branch.owned <= {node.node_id for node in branch.nodes} for branch in tree.branches)
    assert sum(len(node.completion.token_ids) for node in record.nodes) == drawn
