# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false
"""Tools, fields and keys in shapes that other servers failed at; docs/design/0022-reported-failures.md lists them."""

import json

import aiohttp
import anthropic
import openai
import pytest

from etude.algorithm.branches import branches_of
from etude.gateway.api import DIALECTS
from etude.gateway.dialects import chat, messages, responses
from etude.gateway.dialects.chat import CHAT
from etude.gateway.dialects.messages import MESSAGES
from etude.gateway.dialects.responses import RESPONSES
from etude.gateway.doubles import tool_call
from etude.gateway.refusals import CallRefusedError
from etude.types import Edge, SamplingParams

USER = {"role": "user", "content": "fix it"}
CALLS = f"<think>\nhm\n</think>\n\nI look. {tool_call('f', {'a': 1})}{tool_call('f', {'a': 2})}"
BODIES = {
    CHAT.path: {"messages": [USER]},
    MESSAGES.path: {"messages": [USER], "max_tokens": 9},
    RESPONSES.path: {"input": [USER]},
}
BY_PATH = pytest.mark.parametrize("path", BODIES)


def read(dialect, **fields):
    """Return what a dialect makes of a body with these fields."""
    return dialect.parse(json.dumps(BODIES[dialect.path] | fields).encode())


async def post(served, path, body, **headers):
    url = f"http://127.0.0.1:{served.gateway.port}{path}"
    async with served.client.post(url, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


# Everything that an SDK's record has, null or not: https://github.com/vllm-project/vllm/pull/32155.


async def test_items_of_responses_may_be_sent_back_with_all_fields_that_the_sdk_dumps(serve):
    async with serve([CALLS, "b"]) as served, openai.AsyncOpenAI(base_url=served.url, api_key=served.key) as client:
        first = await client.responses.create(model="m", input=[USER])
        told = [item.model_dump() for item in first.output]
        assert any(value is None for item in told for value in item.values())
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "R", "id": None, "status": None}
            for item in told
            if item["type"] == "function_call"
        ]
        await client.responses.create(model="m", input=[USER, *told, *outputs])
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


async def test_a_message_may_be_sent_back_with_all_fields_that_anthropics_sdk_dumps(serve):
    async with serve([CALLS, "b"]) as served:
        address = {"base_url": served.url.removesuffix("/v1"), "api_key": served.key}
        async with anthropic.AsyncAnthropic(**address) as client:
            first = await client.messages.create(model="m", max_tokens=200, messages=[USER])
        told = first.model_dump()
        blank = dict.fromkeys(["text", "thinking", "id", "name", "tool_name", "citations"])
        results = [
            blank | {"type": "tool_result", "tool_use_id": block["id"], "content": "R", "is_error": None}
            for block in told["content"]
            if block["type"] == "tool_use"
        ]
        told["content"] = [blank | block for block in told["content"]]
        status, _ = await post(served, MESSAGES.path, {"messages": [USER, told, {"role": "user", "content": results}]})
        record = await served.close()
    assert status == 200
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}], "model": None}),
        (MESSAGES, {"messages": [{"role": "user", "content": None}], "model": None, "tool_choice": None}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": None, "id": None}]}]}),
        (RESPONSES, {"input": [{"type": None, "role": "user", "content": None, "phase": None}], "model": None}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]}),
    ],
)
def test_null_is_nothing(dialect, fields):
    assert read(dialect, **fields).conversation.messages == ({"role": "user", "content": ""},)


def test_texts_and_developers_are_understood_in_the_words_of_another_dialect():
    """https://github.com/BerriAI/litellm and others pass on what they were given."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "output_text", "text": "c"}]
    (told,) = read(CHAT, messages=[{"role": "user", "content": parts}]).conversation.messages
    assert told["content"] == "a\nb\nc"
    told, _ = read(MESSAGES, messages=[{"role": "developer", "content": "be brief"}, USER]).conversation.messages
    assert told == {"role": "system", "content": "be brief"}


# No tool at all: Semantic Kernel says so in each request, https://github.com/vllm-project/vllm/pull/10000.

NONE = {CHAT.path: "none", MESSAGES.path: {"type": "none"}, RESPONSES.path: "none"}
TOOL = {
    CHAT.path: {"type": "function", "function": {"name": "f"}},
    MESSAGES.path: {"name": "f", "input_schema": {"type": "object"}},
    RESPONSES.path: {"type": "function", "name": "f"},
}
BY_DIALECT = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)


@BY_DIALECT
def test_no_tool_may_be_chosen_where_there_is_none(dialect):
    chosen = NONE[dialect.path]
    for tools in (None, []):
        assert read(dialect, tool_choice=chosen, tools=tools).conversation.tools == ()
    with pytest.raises(CallRefusedError, match="leave the tools out"):
        read(dialect, tool_choice=chosen, tools=[TOOL[dialect.path]])


@pytest.mark.parametrize("auto", [None, "auto", {"type": "auto"}])
def test_auto_is_the_policys_choice_however_it_is_spelled(auto):
    for dialect in (CHAT, RESPONSES):
        assert len(read(dialect, tool_choice=auto, tools=[TOOL[dialect.path]]).conversation.tools) == 1


# Tools in the shape of another API, of a provider's own definition, twice: https://github.com/BerriAI/litellm/issues/9914.


@pytest.mark.parametrize(
    ("dialect", "provided"),
    [
        (CHAT, {"type": "web_search"}),
        (CHAT, {"type": "openrouter:web_search", "parameters": {"engine": "exa"}}),
        (CHAT, {"type": "builtin_function", "function": {"name": "$web_search"}}),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}),
        (MESSAGES, {"type": "mcp_toolset", "mcp_server_name": "x"}),
        (RESPONSES, {"type": "web_search", "name": None}),
        (RESPONSES, {"type": "mcp", "server_label": "x"}),
    ],
)
def test_a_tool_that_only_the_provider_could_run_is_left_out_and_recorded(dialect, provided):
    asked = read(dialect, tools=[provided, TOOL[dialect.path]])
    assert [tool["function"]["name"] for tool in asked.conversation.tools] == ["f"]
    assert asked.requested["left_out_tools"] == [provided["type"]]


@pytest.mark.parametrize(
    ("dialect", "tool", "advice"),
    [
        (CHAT, {"type": "function", "name": "f", "parameters": {}}, "a field function with its name"),
        (CHAT, {"type": "custom", "custom": {"name": "p"}}, "has the type function here"),
        (CHAT, {"type": "function", "function": {"name": ""}}, "has no name"),
        (MESSAGES, TOOL[CHAT.path], "give it an input_schema"),
        (MESSAGES, {"type": "bash_20250124", "name": "bash"}, "give it an input_schema"),
        (MESSAGES, {"type": "text_editor_20250728", "name": "x"}, "give it an input_schema"),
        (MESSAGES, {"input_schema": {}}, "has no name"),
        (RESPONSES, TOOL[CHAT.path], "stands beside its type here"),
        (RESPONSES, {"type": "local_shell"}, "declare it as a function"),
        (RESPONSES, {"type": "apply_patch"}, "declare it as a function"),
    ],
)
def test_a_tool_that_the_policy_could_not_be_told_of_is_refused(dialect, tool, advice):
    """Left out, or told without its name, the harness would get a policy that cannot work, and nobody would know."""
    with pytest.raises(CallRefusedError, match=advice) as refusal:
        read(dialect, tools=[tool])
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_request")


@pytest.mark.parametrize("kind", ["bash_20250124", "function", "custom", None])
def test_a_tool_that_says_what_it_takes_is_offered_whatever_its_type(kind):
    (tool,) = read(MESSAGES, tools=[TOOL[MESSAGES.path] | {"type": kind}]).conversation.tools
    assert tool["function"] == {"name": "f", "parameters": {"type": "object"}}


def test_a_tool_that_is_declared_twice_is_one_and_another_of_its_name_is_refused():
    """Codex tells tools in its input that it may have declared already."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    told = {"type": "additional_tools", "tools": [tool]}
    assert len(read(RESPONSES, input=[told, USER], tools=[tool]).conversation.tools) == 1
    with pytest.raises(CallRefusedError, match="give each a name of its own"):
        read(RESPONSES, input=[told, USER], tools=[tool | {"description": "another"}])


# What a server that keeps conversations would do: summaries, prompts, log-probabilities.


@pytest.mark.parametrize(
    ("parse", "body", "advice"),
    [
        (chat, {"messages": [USER], "logprobs": True, "top_logprobs": 5}, "leave it out"),
        (responses, {"input": "x", "include": ["message.output_text.logprobs"]}, "leave it out"),
        (responses, {"prompt": {"id": "pmpt_1", "version": "2"}}, "send its text as instructions and input"),
        (responses, {"instructions": "x"}, "input: is missing"),
        (responses, {"input": [USER, {"type": "compaction_trigger"}]}, "have the harness summarise it"),
        (responses, {"input": [{"type": "compaction", "encrypted_content": "x"}, USER]}, "have the harness summarise"),
    ],
)
def test_what_is_refused_says_what_to_do(parse, body, advice):
    with pytest.raises(CallRefusedError, match=advice) as refusal:
        parse.parse_request(json.dumps(body).encode())
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_request")


def test_what_asks_for_nothing_is_not_refused():
    assert read(CHAT, logprobs=False, top_logprobs=None)
    assert read(RESPONSES, include=["reasoning.encrypted_content"], prompt=None, truncation="auto", store=True)
    assert messages.parse_count(json.dumps({"messages": [USER], "model": None}).encode())


async def test_codex_is_told_how_to_summarise_by_itself(serve):
    """https://github.com/caozhiyuan/copilot-api/issues/359: it has no second way."""
    async with serve(["a"]) as served:
        status, body = await post(served, "/v1/responses/compact", {"input": [USER]})
        assert status == 404
        assert "the name of its provider is not OpenAI" in body["error"]["message"]


# Two keys, one of them of somebody else: https://github.com/Alishahryar1/free-claude-code/issues/902.


@BY_PATH
async def test_of_a_key_and_a_token_the_one_that_is_known_counts(serve, path):
    async with serve(["a"] * 6) as served:
        key = served.key
        for token in ("Bearer sk-ant-of-somebody", "Bearer", "Bearer ", f"Bearer  {key}", f"Basic {key}"):
            status, _ = await post(served, path, BODIES[path], **{"Authorization": token, "x-api-key": key})
            assert status == 200, token
        headers = {"Authorization": f"Bearer {key}", "x-api-key": "sk-ant-of-somebody"}
        assert (await post(served, path, BODIES[path], **headers))[0] == 200
        await served.close()
        over = {CHAT.path: 404, MESSAGES.path: 403, RESPONSES.path: 400}[path]
        for told in (headers, {"Authorization": "Bearer somebody", "x-api-key": key}):
            assert (await post(served, path, BODIES[path], **told))[0] == over
        nobody = {"Authorization": "Bearer somebody", "x-api-key": "sk-ant-of-somebody"}
        assert (await post(served, path, BODIES[path], **nobody))[0] == 401


async def test_a_client_that_tries_a_websocket_is_sent_to_http(serve):
    """https://github.com/openai/codex/issues/19821: after any other status Codex tries five times."""
    async with serve(["a"]) as served:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await served.client.ws_connect(f"{served.url}/responses")
        assert refusal.value.status == 426
        assert (await post(served, RESPONSES.path, BODIES[RESPONSES.path]))[0] == 200


# Two sub-agents with one task: https://github.com/anthropics/claude-code/issues/7955.


async def test_sub_agents_that_are_asked_the_same_word_for_word_are_two_and_a_third_time_is_a_retry(serve):
    prompt = "Run all tests of the repository, and say which ones fail."
    asks = tool_call("agent", {"prompt": prompt})
    answers = [f"{asks}{asks}", "The first one found nothing that fails.", "The other one saw two fail.", "again", "ok"]
    helper = {"role": "system", "content": "You help."}, {"role": "user", "content": f"<hint>\n</hint>\n{prompt}"}
    async with serve(answers, params=SamplingParams(max_tokens=400)) as served:
        _, body = await served.ask(USER)
        answer = body["choices"][0]["message"]
        said = [(await served.ask(*helper))[1]["choices"][0]["message"]["content"] for _ in range(2)]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(answer["tool_calls"], said, strict=True)
        ]
        await served.ask(*helper)
        await served.ask(USER, answer, *results)
        record = await served.close()
    edges = [(node.edge, node.link) for node in record.nodes]
    begun = (Edge.SUBAGENT_CALL, 0)
    assert edges == [(Edge.ROOT, None), begun, begun, (Edge.RETRY, 1), (Edge.SUBAGENT_RETURN, 2)]
    assert [node.node_id for node in branches_of(record.nodes).superseded] == [1], "its repetition stands for it"
