# pyright: basic, reportArgumentType=false, reportIndexIssue=false
"""Requests that other servers were reported to fail at; docs/design/0022-reported-failures.md lists them."""

import gzip
import json
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from renderer_kit import RENDERERS, TOKENIZER, call

from etude.gateway.api import DIALECTS
from etude.gateway.dialects import chat, messages, responses
from etude.gateway.dialects.chat import CHAT
from etude.gateway.dialects.messages import MESSAGES
from etude.gateway.dialects.responses import RESPONSES
from etude.gateway.doubles import ScriptedSampler, tool_call
from etude.gateway.refusals import CallRefusedError
from etude.types import Edge

USER = {"role": "user", "content": "fix it"}
BODIES = {
    CHAT.path: {"messages": [USER]},
    MESSAGES.path: {"messages": [USER], "max_tokens": 9},
    RESPONSES.path: {"input": [USER]},
}
BY_PATH = pytest.mark.parametrize("path", BODIES)
BY_DIALECT = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)


def saying(text):
    """Return a body of each dialect in which a user says this, as JSON of JavaScript: halves of characters escaped."""
    user = {"role": "user", "content": text}
    bodies = {
        path: {field: [user] if field in ("messages", "input") else 9 for field in BODIES[path]} for path in BODIES
    }
    return {path: json.dumps(body).encode() for path, body in bodies.items()}


async def post(served, path, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with served.client.post(f"http://127.0.0.1:{served.gateway.port}{path}", data=data, headers=headers) as reply:
        return reply.status, await reply.json()


# Addresses: https://github.com/BerriAI/litellm/issues/36956 and many others.


@BY_PATH
@pytest.mark.parametrize("spelling", ["{}", "{}/", "/{}", "//{}//", "/v1{}", "/v1/v1{}/", "bare"])
async def test_a_base_address_may_end_with_the_version_or_a_slash_or_without(serve, path, spelling):
    asked = path.removeprefix("/v1") if spelling == "bare" else spelling.format(path)
    async with serve(["a", "b"]) as served:
        assert (await post(served, asked, BODIES[path]))[0] == 200
        keyless = f"/s/{served.key}{asked}"
        status, _ = await post(served, keyless, BODIES[path] | {"model": "m"}, Authorization="Bearer nobody")
        assert status == 200
        assert served.gateway.api.tally[path, 200] == 2


@pytest.mark.parametrize("path", ["/v2/messages", "/v1/messages/batches", "/v1/completions", "/v1x/messages", "/", ""])
async def test_what_is_not_served_stays_a_404_that_says_what_is(serve, path):
    async with serve(["a"]) as served:
        status, body = await post(served, path, {})
        assert status == 404
        assert "/v1/chat/completions" in body["error"]["message"]


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET", "PUT"])
async def test_a_client_that_only_looks_whether_somebody_is_there_is_answered(serve, method):
    """Claude Code sends HEAD / before its first call, browsers OPTIONS."""
    async with serve(["a"]) as served:
        for path in ("/", *BODIES):
            url = f"http://127.0.0.1:{served.gateway.port}{path}"
            async with served.client.request(method, url) as reply:
                assert reply.status in (404, 405)
        assert (await post(served, CHAT.path, BODIES[CHAT.path]))[0] == 200


# Half a character: https://github.com/anthropics/claude-code/issues/2108, 60394 and dozens of others.


def whole(text):
    """Return a text as a browser sends it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(
    st.lists(st.sampled_from(["\ud83d", "\ude00", "\\", "u", "d83d", "n", '"', "😀", "a"]) | st.text(max_size=3)).map(
        "".join
    )
)
def test_half_a_character_is_a_replacement_character_and_nothing_else_changes(text):
    for dialect in DIALECTS:
        (told,) = dialect.parse(saying(text)[dialect.path]).conversation.messages
        assert told["content"] == whole(text)


@BY_DIALECT
def test_half_a_character_in_a_large_body_with_tools_is_mended_too(dialect):
    body = json.loads(saying("x" * (1 << 20) + "\ud83d")[dialect.path])
    tool = {"type": "custom" if dialect is MESSAGES else "function", "name": "f", "function": {"name": "f"}}
    asked = dialect.parse(json.dumps(body | {"tools": [tool]}).encode())
    assert asked.conversation.messages[0]["content"].endswith("x\ufffd")


@BY_DIALECT
def test_a_body_that_is_made_to_take_long_to_mend_is_refused(dialect):
    body = saying("\ud83d")[dialect.path].replace(b'"\\ud83d"', b'"' + rb"\\a" * 300_000 + b'\\ud83d"')
    with pytest.raises(CallRefusedError) as refusal:
        dialect.parse(body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_request")


# Arguments of nothing: https://github.com/vllm-project/vllm/issues/19419, pull 33268, pull 43861.

NOTHING = [None, "", " \n", "null", "{}"]


def chat_call(call_id, arguments):
    return {"id": call_id, "type": None, "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("nothing", NOTHING)
async def test_a_call_without_arguments_continues_however_nothing_is_spelled(serve, nothing):
    async with serve([tool_call("f", {}), "b", "c"]) as served:
        _, body = await served.ask(USER)
        answer = body["choices"][0]["message"]
        call_id = answer["tool_calls"][0]["id"]
        told = answer | {"content": None, "tool_calls": [chat_call(call_id, nothing)], "function_call": None}
        status, _ = await served.ask(USER, told, {"role": "tool", "tool_call_id": call_id, "content": "R"})
        item = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": nothing}
        output = {"type": "function_call_output", "call_id": call_id, "output": "R"}
        again, _ = await post(served, RESPONSES.path, {"input": [USER, item, output]})
        record = await served.close()
    assert (status, again) == (200, 200)
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.RETRY]


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_tool_use_without_an_input_has_an_empty_one(nothing):
    block = {"type": "tool_use", "id": "1", "name": "f", "input": nothing}
    body = {"messages": [USER, {"role": "assistant", "content": [block]}, USER]}
    _, answer, _ = messages.parse_request(json.dumps(body).encode()).conversation.messages
    assert answer["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"text"', "{'a': 1}"])
async def test_malformed_arguments_in_a_history_do_not_end_a_session(serve, arguments):
    """https://github.com/vllm-project/vllm/pull/48922: every later request of the session would fail likewise."""
    async with serve(["a"]) as served:
        told = {"role": "assistant", "content": None, "tool_calls": [chat_call("x", arguments)]}
        status, _ = await served.ask(USER, told, {"role": "tool", "tool_call_id": "x", "content": "no JSON"})
    assert status == 200


# What SDKs and frameworks write when they write a message out again.


async def test_a_message_may_be_sent_back_with_all_fields_that_a_library_gives_it(serve):
    """https://github.com/vllm-project/vllm/pull/12788: tool_calls that are null."""
    empty = dict.fromkeys(["refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning", "name"])
    async with serve(["a", "b"]) as served:
        _, body = await served.ask(USER | empty)
        status, _ = await served.ask(USER | empty, empty | body["choices"][0]["message"], USER | {"tool_call_id": None})
        record = await served.close()
    assert status == 200
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], "absent"])
async def test_a_call_without_text_continues_however_no_text_is_spelled(serve, content):
    """https://github.com/vllm-project/vllm/issues/54337, https://github.com/Blaizzy/mlx-vlm/issues/1785."""
    async with serve([tool_call("f", {"a": 1}), "b"]) as served:
        _, body = await served.ask(USER)
        answer = {**body["choices"][0]["message"], "content": content}
        if content == "absent":
            del answer["content"]
        call_id = answer["tool_calls"][0]["id"]
        status, _ = await served.ask(USER, answer, {"role": "tool", "tool_call_id": call_id, "content": content or "R"})
        record = await served.close()
    assert status == 200
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


# Reasoning has two names: https://github.com/vllm-project/vllm/issues/27755, 38488.


async def test_reasoning_is_told_and_understood_by_both_names(serve):
    async with serve(["<think>\nhm\n</think>\n\nso", "b"]) as served:
        _, body = await served.ask(USER)
        message = body["choices"][0]["message"]
        assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
        async with served.client.post(
            f"{served.url}/chat/completions", json={"messages": [USER], "stream": True}
        ) as sent:
            assert b'"reasoning"' not in await sent.read(), "an answer without reasoning"
    for name in ("reasoning", "reasoning_content"):
        told = {"role": "assistant", "content": "so", name: "hm"}
        (_, answer, _) = chat.parse_request(json.dumps({"messages": [USER, told, USER]}).encode()).conversation.messages
        assert answer == {"role": "assistant", "content": "so", "reasoning_content": "hm"}


async def test_a_stream_tells_reasoning_by_both_names(serve):
    stream = {"messages": [USER], "stream": True}
    async with serve(["<think>\nhm\n</think>\n\nso"]) as served:
        sent = await served.client.post(f"{served.url}/chat/completions", json=stream)
        lines = (await sent.text()).split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert {"reasoning_content": "hm", "reasoning": "hm"} in deltas


# Parallel calls that frameworks take apart: messages of their own in Chat Completions, text behind them in Responses.


def result(call):
    return {"role": "tool", "tool_call_id": call["id"], "content": f"R of {call['id']}"}


async def test_parallel_calls_that_come_back_as_messages_of_their_own_are_one_answer(serve):
    drawn = f"I look. {tool_call('f', {'a': 1})}{tool_call('f', {'a': 2})}"
    async with serve([drawn, "b", "c"]) as served:
        _, body = await served.ask(USER)
        answer = body["choices"][0]["message"]
        one, two = answer["tool_calls"]
        first = {"role": "assistant", "content": answer["content"], "tool_calls": [one]}
        second = {"role": "assistant", "content": None, "tool_calls": [two]}
        await served.ask(USER, first, result(one), second, result(two))
        await served.ask(USER, answer, result(one), result(two))
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.RETRY], "it is the same prompt"


async def test_text_that_a_framework_sends_behind_its_calls_is_of_the_same_answer(serve):
    """https://github.com/kolega-ai/kolega-code/pull/403."""
    async with serve([f"I look. {tool_call('f', {})}", "b"]) as served:
        _, body = await post(served, RESPONSES.path, {"input": [USER]})
        text, call = body["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "R"}
        await post(served, RESPONSES.path, {"input": [USER, call, text, output]})
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


def test_answers_that_follow_one_another_stay_apart():
    told = [{"role": "assistant", "content": text} for text in ("a", "", "b")]
    body = json.dumps({"messages": [USER, *told, USER]}).encode()
    assert [one.get("content") for one in chat.parse_request(body).conversation.messages[1:-1]] == ["a", "", "b"]


# Names that a policy gives to its calls: https://github.com/vllm-project/vllm/issues/50295, sglang pull 33343.


async def test_calls_have_ids_of_their_own_though_a_policy_names_them_alike(serve):
    look = {"role": "assistant", "content": "", "tool_calls": [call("f", "{}"), call("f", '{"a": 1}')]}
    sampler = ScriptedSampler([RENDERERS["kimi-k2"].answer(look)] * 2, tokenizer=TOKENIZER)
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serve([], sampler=sampler, renderer=RENDERERS["kimi-k2"]) as served:
        told, ids = [USER], []
        for _ in range(2):
            _, body = await served.ask(*told, tools=tools)
            answer = body["choices"][0]["message"]
            ids += [one["id"] for one in answer["tool_calls"]]
            told += [answer, *map(result, answer["tool_calls"])]
        record = await served.close()
    assert len(set(ids)) == 4
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]
    seen = TOKENIZER.decode(record.nodes[1].prompt_ids, skip_special_tokens=False)
    assert seen.count("## Return of functions.f:0\n") == 2, "the policy is told the names that it gave"


async def test_calls_that_say_the_same_keep_their_names_when_a_conversation_is_read_anew(serve):
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    look = [thought | {"tool_calls": [call("f", "{}", number)]} for number in range(2)]
    done = thought | {"content": "done"}
    renderer = RENDERERS["kimi-k2-thinking"]
    sampler = ScriptedSampler([renderer.answer(said) for said in (*look, done, done)], tokenizer=TOKENIZER)
    async with serve([], sampler=sampler, renderer=renderer) as served:
        told = [USER]
        for _ in range(3):
            _, body = await served.ask(*told)
            answer = body["choices"][0]["message"]
            told += [answer, *map(result, answer.get("tool_calls", ()))]
        await served.ask(*told, USER)
        record = await served.close()
    assert record.nodes[-1].edge is Edge.UNEXTENDABLE
    seen = TOKENIZER.decode(record.nodes[-1].prompt_ids, skip_special_tokens=False)
    names = ["tool_call_begin|>functions.f:0", "of functions.f:0", "tool_call_begin|>functions.f:1", "of functions.f:1"]
    assert [seen.count(name) for name in names] == [1, 1, 1, 1]
    assert sorted(names, key=seen.index) == names


# Compressed bodies: https://github.com/openai/codex/issues/41662 and a dozen proxies.

CODINGS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
    "identity": bytes,
}


@BY_PATH
@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_body_is_unpacked(serve, path, coding):
    async with serve(["a"]) as served:
        told = CODINGS[coding](json.dumps(BODIES[path]).encode())
        assert (await post(served, path, told, **{"Content-Encoding": coding.upper()}))[0] == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_no_more_is_unpacked_than_a_body_may_have(serve, coding):
    async with serve(["a"]) as served:
        bomb = CODINGS[coding](b" " * (64 << 20))
        assert len(bomb) < 1 << 20
        status, body = await post(served, CHAT.path, bomb, **{"Content-Encoding": coding})
        assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_a_broken_or_unknown_coding_is_refused_in_the_dialects_envelope(serve, coding):
    async with serve(["a"]) as served:
        told = CODINGS[coding](json.dumps(BODIES[MESSAGES.path]).encode())
        for broken in (b"", b"{}", told[:-6], told[4:]):
            status, body = await post(served, MESSAGES.path, broken, **{"Content-Encoding": coding})
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        status, body = await post(served, MESSAGES.path, told, **{"Content-Encoding": f"{coding}, br"})
        assert (status, "plain JSON" in body["error"]["message"]) == (415, True)


# HTTP clients of other languages: https://github.com/vllm-project/vllm and Java's, which offers to speak HTTP/2.


@BY_PATH
async def test_an_offer_to_speak_http_2_does_not_cost_a_request_its_body(serve, path):
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAA"}
    async with serve(["a", "b"]) as served:
        body = json.dumps(BODIES[path]).encode()
        assert (await post(served, path, body, **upgrade))[0] == 200

        async def pieces():
            yield body[:5]
            yield body[5:]

        url = f"http://127.0.0.1:{served.gateway.port}{path}"
        async with served.client.post(url, data=pieces(), headers=upgrade) as reply:
            assert reply.status == 200


# What is refused says what to do: a begun answer, a format, an image, things of a server that keeps conversations.

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("parse", "body", "advice"),
    [
        (chat, {"messages": [USER, USER | {"role": "assistant", "prefix": True}]}, "must end with a user message"),
        (chat, {"messages": [USER, USER | {"role": "assistant", "partial": True}]}, "must end with a user message"),
        (chat, {"messages": [USER], "continue_final_message": True}, "must end with a user message"),
        (chat, {"messages": [USER], "add_generation_prompt": False}, "must end with a user message"),
        (messages, {"messages": [USER, {"role": "assistant", "content": "{"}]}, "must end with a user message"),
        (chat, {"messages": [USER], "guided_json": {}}, "ask for the format in a message"),
        (chat, {"messages": [USER], "structured_outputs": {"regex": "a"}}, "ask for the format in a message"),
        (chat, {"messages": [USER], "response_format": {"type": "json_object"}}, "ask for the format in a message"),
        (messages, {"messages": [USER], "output_format": {"type": "x"}}, "ask for the format in a message"),
        (responses, {"input": "x", "text": {"format": {"type": "json_object"}}}, "ask for the format in a message"),
        (chat, {"messages": [USER], "tool_choice": "required"}, "leave it out"),
        (messages, {"messages": [USER], "tool_choice": {"type": "any"}}, "leave it out"),
        (responses, {"input": "x", "tool_choice": "required"}, "leave it out"),
        (chat, {"messages": [{"role": "user", "content": [IMAGE]}]}, "say in text what it holds"),
        (chat, {"messages": [{"role": "tool", "content": [IMAGE]}]}, "say in text what it holds"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "say in text what it holds"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "say in text what it holds"),
        (chat, {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]}, "use tools instead"),
        (responses, {"input": "x", "previous_response_id": "r"}, "send the whole conversation"),
        (responses, {"input": [{"type": "item_reference", "id": "m"}]}, "send messages, reasoning, and calls"),
    ],
)
def test_what_is_refused_says_what_to_do(parse, body, advice):
    with pytest.raises(CallRefusedError, match=advice) as refusal:
        parse.parse_request(json.dumps(body).encode())
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_request")


def test_a_tool_that_a_search_found_is_told_by_its_name():
    """https://github.com/router-for-me/CLIProxyAPI/pull/1892."""
    found = [{"type": "tool_reference", "tool_name": "shell"}, {"type": "text", "text": "1 more"}]
    body = {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": found}]}]}
    (told,) = messages.parse_request(json.dumps(body).encode()).conversation.messages
    assert told["content"] == "shell\n1 more"


# What is over ends each harness at its first request: docs/design/0022-reported-failures.md.


@pytest.mark.parametrize(
    ("path", "over", "kind"),
    [
        (CHAT.path, 404, "invalid_request_error"),
        (RESPONSES.path, 400, "invalid_request_error"),
        (MESSAGES.path, 403, "permission_error"),
    ],
)
async def test_what_is_over_is_told_by_the_status_that_harnesses_of_the_dialect_end_at(serve, path, over, kind):
    async with serve(["a"], max_calls=1) as served:
        assert (await post(served, path, BODIES[path]))[0] == 200
        spent = await post(served, path, BODIES[path] | {"model": "m"})
        streamed = await post(served, path, BODIES[path] | {"stream": True})
        await served.close()
        closed = await post(served, path, BODIES[path])
        unknown = await post(served, path, BODIES[path], Authorization="Bearer nobody")
    assert [status for status, _ in (spent, streamed, closed)] == [over] * 3
    assert {body["error"]["type"] for _, body in (spent, streamed, closed)} == {kind}
    assert (unknown[0], unknown[1]["error"]["type"]) == (401, "authentication_error")
