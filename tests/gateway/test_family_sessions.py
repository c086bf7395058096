# pyright: basic, reportArgumentType=false
"""The families' renderers inside of a gateway: where a session continues, and where it branches."""

import pytest
from renderer_kit import RENDERERS, TOKENIZER, call
from template_kit import SMOLLM2

from etude.gateway.doubles import ScriptedSampler
from etude.gateway.renderers.chat_template import ChatTemplate
from etude.gateway.renderers.registry import prove
from etude.types import Edge

QUESTION = {"role": "user", "content": "go"}
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]


def drawing(name, *answers):
    """Return a sampler that draws answers as the family spells them."""
    return ScriptedSampler([RENDERERS[name].answer(said) for said in answers], tokenizer=TOKENIZER)


async def ask(served, *messages):
    status, body = await served.ask(*messages, tools=TOOLS)
    assert status == 200, body
    return body["choices"][0]["message"]


@pytest.mark.row("P-55")
async def test_results_continue_reasoning_and_a_question_branches_without_ending_the_session(serve):
    look = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call("shell", "{}")]}
    done = {"role": "assistant", "content": "done", "reasoning_content": "so"}
    async with serve([], sampler=drawing("qwen3", look, done, done), renderer=RENDERERS["qwen3"]) as served:
        first = await ask(served, QUESTION)
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "R"}
        second = await ask(served, QUESTION, first, result)
        await ask(served, QUESTION, first, result, second, QUESTION)
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.UNEXTENDABLE]
    seen = TOKENIZER.decode(record.nodes[2].prompt_ids, skip_special_tokens=False)
    assert "done" in seen
    assert "why" not in seen


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.1", "kimi-k2", "llama-3", "qwen3-keep"])
async def test_a_session_of_calls_results_and_questions_is_one_branch(serve, name):
    look = {"role": "assistant", "content": "", "tool_calls": [call("shell", '{"command" :"ls"}')]}
    done = {"role": "assistant", "content": "done"}
    async with serve([], sampler=drawing(name, look, done, done), renderer=RENDERERS[name]) as served:
        first = await ask(served, QUESTION)
        assert first["tool_calls"][0]["function"] == {"name": "shell", "arguments": '{"command" :"ls"}'}
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "R"}
        second = await ask(served, QUESTION, first, result)
        await ask(served, QUESTION, first, result, second, QUESTION)
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.CONTINUATION]
    drawn = [*record.nodes[0].prompt_ids]
    for node in record.nodes[1:]:
        drawn += [*record.nodes[node.node_id - 1].completion.token_ids, *node.prompt_ids]
    named = result | {"tool_call_id": look["tool_calls"][0]["id"]}
    whole = RENDERERS[name].render([QUESTION, look, named, done, QUESTION], TOOLS)
    assert drawn == whole


async def test_what_a_template_refuses_is_a_400_and_the_session_goes_on(serve):
    strict = ChatTemplate(SMOLLM2.replace("{%- for", "{{- raise_exception('one tool only') if tools -}}{%- for", 1))
    sampler = drawing("smollm2", {"role": "assistant", "content": "yes"})
    async with serve([], sampler=sampler, renderer=prove(TOKENIZER, strict).renderer) as served:
        status, body = await served.ask(QUESTION, tools=TOOLS)
        assert (status, "one tool only" in body["error"]["message"]) == (400, True)
        status, _ = await served.ask(QUESTION)
        assert status == 200
