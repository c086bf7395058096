# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
import asyncio
import io
import json
import socket
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from etude.errors import HostError, SamplerError, VersionUnavailableError
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.gateway.sessions import call_seed
from etude.interfaces import SessionHost
from etude.types import Edge, FinishReason, SampleRequest, SamplingParams

TOKENIZER = byte_tokenizer()
HOST: type[SessionHost] = Gateway
USER = {"role": "user", "content": "fix it"}
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
LS = '<tool_call>{"name": "shell", "arguments": {"command":  "ls"}}</tool_call>'


def code(body):
    return body["error"]["code"]


def message_of(body):
    return body["choices"][0]["message"]


async def test_a_turn_extends_the_exact_tokens_of_the_turn_before(serve):
    async with serve([LS, "done"]) as served:
        _, first = await served.ask(USER, tools=TOOLS)
        call = message_of(first)["tool_calls"][0]
        assert call["function"] == {"name": "shell", "arguments": '{"command":  "ls"}'}
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        # As harnesses do: arguments re-spelled, text dropped, fields added.
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        spoken = {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a.py\n"}
        _, second = await served.ask(USER, spoken, result, tools=TOOLS)
        record = await served.close()
    one, two = served.sampler.requests
    drawn = record.nodes[0].completion.token_ids
    assert two.prompt_ids[: len(one.prompt_ids) + len(drawn)] == one.prompt_ids + drawn
    assert [(node.parent, node.edge) for node in record.nodes] == [(None, Edge.ROOT), (0, Edge.CONTINUATION)]
    assert two.prompt_ids[len(one.prompt_ids) + len(drawn) :] == record.nodes[1].prompt_ids
    assert message_of(second)["content"] == "done"
    assert second["usage"]["prompt_tokens"] == len(two.prompt_ids)
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert record.failure is None
    assert record.truncated == ""


async def test_tokens_are_never_made_again_from_text(serve):
    apart = [TOKENIZER.token_to_id(token) for token in ("a", "b", "<|im_end|>")]
    assert TOKENIZER.encode("ab").ids != apart[:2]
    async with serve([apart, "done"]) as served:
        _, first = await served.ask(USER)
        assert message_of(first)["content"] == "ab"
        await served.ask(USER, message_of(first), USER)
        await served.close()
    one, two = served.sampler.requests
    assert list(two.prompt_ids[len(one.prompt_ids) :][:3]) == apart


async def test_a_branch_keeps_each_position_of_the_experts_once(serve):
    async with serve([LS, "done", "other"]) as served:
        _, first = await served.ask(USER)
        spoken = message_of(first)
        await served.ask(USER, spoken, {"role": "tool", "content": "x"})
        await served.ask(USER, spoken, {"role": "tool", "content": "y"})
        record = await served.close()
    row_bytes = 2 * 2 * 2
    for leaf in (1, 2):
        root, node = record.nodes[0], record.nodes[leaf]
        rows = root.completion.experts.expert_ids + node.completion.experts.expert_ids
        length = sum(len(part.prompt_ids) + len(part.completion.token_ids) for part in (root, node))
        whole = await ScriptedSampler([[9] * length], tokenizer=TOKENIZER).sample(
            SampleRequest(request_id="x", session_id="x", prompt_ids=(0,), params=SamplingParams(max_tokens=length))
        )
        assert rows == whole.experts.expert_ids[: (length - 1) * row_bytes]


async def test_a_changed_history_a_changed_tool_and_a_repetition_branch_with_their_reason(serve):
    async with serve(["a", "b", "c", "d", "e"]) as served:
        await served.ask(USER, tools=TOOLS)
        await served.ask(USER, tools=TOOLS)
        await served.ask(USER)
        await served.ask({"role": "user", "content": "other"}, tools=TOOLS)
        invented = {"role": "assistant", "content": "never said"}
        await served.ask(USER, invented, USER, tools=TOOLS)
        record = await served.close()
    edges = [node.edge for node in record.nodes]
    assert edges == [Edge.ROOT, Edge.RETRY, Edge.TOOLS_CHANGED, Edge.REWRITE, Edge.REWRITE]
    assert [node.link for node in record.nodes] == [None, 0, 1, 1, 2]
    assert record.metrics["gateway/edges_rewrite"] == 2
    assert record.metrics["gateway/edges_tools_changed"] == 1
    assert record.metrics["gateway/edges_retry"] == 1
    assert record.metrics["gateway/prefix_break_rate"] == 3 / 5


async def test_a_branch_spells_earlier_answers_as_they_were_drawn(serve):
    async with serve([LS, "done"]) as served:
        _, first = await served.ask(USER)
        spoken = message_of(first)
        spoken["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'
        await served.ask({"role": "system", "content": "new"}, USER, spoken, USER)
        record = await served.close()
    assert record.nodes[1].edge is Edge.REWRITE
    assert LS in TOKENIZER.decode(record.nodes[1].prompt_ids)


async def test_sampling_is_pinned_and_what_was_asked_for_is_recorded(serve):
    async with serve(["a", "b"], seed=3, params=SamplingParams(max_tokens=50, top_k=5), exact_version=0) as served:
        await served.ask(USER, temperature=0.1, max_tokens=3, seed=1, stop=["x" * 100])
        await served.ask(USER)
        record = await served.close()
    one, two = served.sampler.requests
    assert (one.params.temperature, one.params.top_k, one.params.max_tokens) == (1.0, 5, 3)
    assert one.params.stop_token_ids == ChatMLRenderer(TOKENIZER).stop_token_ids
    assert (one.params.seed, two.params.seed) == (call_seed(3, 0), call_seed(3, 1))
    assert one.exact_version == 0
    assert record.requested_sampling == (
        {"temperature": 0.1, "max_tokens": 3, "seed": 1, "stop": ["x" * 64]},
        {},
    )


async def test_max_tokens_is_clamped_to_the_context_and_to_what_the_session_has_left(serve):
    async with serve(["a" * 60, "b" * 60], max_session_tokens=90, context_length=150) as served:
        _, first = await served.ask(USER)
        await served.ask(USER, message_of(first), USER)
        status, body = await served.ask(USER)
        record = await served.close()
    one, two = served.sampler.requests
    assert one.params.max_tokens == min(90, 150 - len(one.prompt_ids))
    assert two.params.max_tokens == min(90 - 61, 150 - len(two.prompt_ids))
    assert sum(len(node.completion.token_ids) for node in record.nodes) == 90
    assert record.nodes[1].completion.finish_reason is FinishReason.LENGTH
    assert (status, code(body), record.truncated) == (404, "session_limit_reached", "session_tokens")


async def test_an_answer_ends_where_the_context_ends(serve):
    async with serve(["a" * 150], context_length=120) as served:
        _, body = await served.ask(USER)
    assert body["usage"]["total_tokens"] == 120
    assert body["choices"][0]["finish_reason"] == "length"


async def test_an_answer_cut_short_is_continued_after_a_synthetic_end_of_turn(serve):
    async with serve(["a" * 60, "b"], params=SamplingParams(max_tokens=5)) as served:
        _, first = await served.ask(USER)
        assert first["choices"][0]["finish_reason"] == "length"
        await served.ask(USER, message_of(first), USER)
        record = await served.close()
    assert record.nodes[1].edge is Edge.CONTINUATION
    assert record.nodes[1].prompt_ids[0] == TOKENIZER.token_to_id("<|im_end|>")


async def test_the_call_limit_is_a_permanent_error(serve):
    async with serve(["a", "b"], max_calls=1) as served:
        assert (await served.ask(USER))[0] == 200
        status, body = await served.ask(USER)
        record = await served.close()
    assert (status, code(body), record.truncated, record.num_calls) == (404, "session_limit_reached", "calls", 1)


async def test_an_over_long_prompt_is_openais_own_error_and_forgiven_when_the_harness_shortens_it(serve):
    async with serve(["a"], context_length=60) as served:
        _, body = await served.ask({"role": "user", "content": "x" * (1 << 19)})
        assert "8192 tokens" in body["error"]["message"], "so long a prompt is not even encoded"
        status, body = await served.ask({"role": "user", "content": "x" * 100})
        assert (status, code(body), body["error"]["type"]) == (400, "context_length_exceeded", "invalid_request_error")
        await served.ask(USER)
        record = await served.close()
    assert (record.truncated, record.num_calls) == ("", 1)


async def test_only_the_key_of_an_open_session_is_answered(serve):
    async with serve(["a"]) as served:
        status, body = await served.ask(USER, headers={"Authorization": "Bearer sk-wrong"})
        assert (status, code(body)) == (401, "invalid_api_key")
        status, body = await served.ask(USER, headers={"Authorization": ""})
        assert (status, code(body)) == (401, "invalid_api_key")
        status, _ = await served.ask(USER, headers={"Authorization": "", "x-api-key": served.key})
        assert status == 200
        await served.close()
        status, body = await served.ask(USER)
        assert (status, code(body)) == (404, "session_closed")
        with pytest.raises(ValueError, match="not open"):
            await served.close()


async def test_sessions_do_not_see_each_other(serve):
    async with serve(["a", "b"]) as served:
        key = await served.gateway.open(replace(served.spec, session_id="t"))
        await served.ask(USER)
        await served.ask(USER, headers={"Authorization": f"Bearer {key}"})
        with pytest.raises(ValueError, match="open already"):
            await served.gateway.open(served.spec)
        other = await served.gateway.close("t")
    assert [node.edge for node in other.nodes] == [Edge.ROOT]


@pytest.mark.parametrize(
    ("error", "status", "name", "reason"),
    [
        (SamplerError("down"), 503, "model_unavailable", "unavailable"),
        (ConnectionRefusedError("down"), 503, "model_unavailable", "unavailable"),
        (TimeoutError(), 503, "model_unavailable", "timeout"),
        (VersionUnavailableError("not yet"), 429, "model_busy", "version_unavailable"),
    ],
)
async def test_a_failing_sampler_is_a_retryable_error_until_it_answers(serve, error, status, name, reason):
    async with serve([error, "a"]) as served:
        url = f"{served.url}/chat/completions"
        async with served.client.post(url, json={"messages": [USER]}) as response:
            assert (response.status, code(await response.json())) == (status, name)
            assert response.headers["Retry-After"] == "1"
        async with served.client.post(url, json={"messages": [USER]}) as response:
            assert response.status == 200
        record = await served.close()
    one, two = served.sampler.requests
    assert one == two
    assert (record.failure, record.num_calls, len(record.nodes)) == (None, 1, 1)


async def test_a_sampler_that_never_answers_fails_the_session(serve):
    async with serve([SamplerError("down")]) as served:
        await served.ask(USER)
        record = await served.close()
    assert (record.failure.component, record.failure.reason) == ("sampler", "unavailable")


async def test_a_sampler_that_hangs_is_given_up_after_the_time_limit(serve, gated):
    sampler = gated("a")
    async with serve([], sampler=sampler, call_timeout_s=0.05) as served:
        status, body = await served.ask(USER)
        record = await served.close()
    assert (status, code(body), record.failure.reason) == (503, "model_unavailable", "timeout")


async def test_an_unusable_completion_fails_the_session_for_good(serve):
    async with serve([[5, 6], "a"], sampler=SimpleNamespace(sample=unversioned)) as served:
        status, body = await served.ask(USER)
        assert (status, code(body)) == (404, "session_failed")
        status, body = await served.ask(USER)
        assert (status, code(body)) == (404, "session_failed")
        record = await served.close()
    assert (record.failure.component, record.failure.reason) == ("sampler", "completion_versions_count")
    assert record.nodes == ()


async def unversioned(request):
    return replace(await ScriptedSampler(["a"], tokenizer=TOKENIZER).sample(request), versions=())


async def test_a_fault_of_the_gateway_itself_is_typed_and_permanent(serve):
    async with serve(["a"], renderer=Unparsable(TOKENIZER)) as served:
        status, body = await served.ask(USER)
        assert (status, code(body)) == (404, "session_failed")
        record = await served.close()
    assert (record.failure.component, record.failure.reason) == ("gateway", "unexpected_error")
    assert "ZeroDivisionError" in record.failure.message


class Unparsable(ChatMLRenderer):
    def parse(self, token_ids):
        raise ZeroDivisionError


async def test_a_marked_retry_in_flight_joins_and_afterwards_replays(serve, gated):
    sampler = gated("a", "b")
    retry = {"x-stainless-retry-count": "1"}
    async with serve([], sampler=sampler) as served:
        async with asyncio.TaskGroup() as calls:
            first = calls.create_task(served.ask(USER))
            await sampler.asked.wait()
            second = calls.create_task(served.ask(USER, headers=retry))
            sampler.gate.set()
        third = await served.ask(USER, headers=retry)
        assert first.result() == second.result() == third
        assert (await served.ask(USER))[1] != third[1], "an unmarked repetition is a call of its own"
        record = await served.close()
    assert len(record.nodes) == 2
    assert record.metrics["gateway/replays"] == 2


async def test_an_idempotency_key_replays_and_is_bound_to_its_body(serve):
    headers = {"Idempotency-Key": "k"}
    async with serve(["a", "b"]) as served:
        assert await served.ask(USER, headers=headers) == await served.ask(USER, headers=headers)
        status, body = await served.ask(USER, USER, headers=headers)
        assert (status, code(body)) == (400, "idempotency_key_reused")
        assert len(served.sampler.requests) == 1


async def test_a_client_that_goes_away_neither_cancels_nor_draws_twice(serve, gated):
    sampler = gated("a", "b")
    async with serve([], sampler=sampler) as served:
        cut = asyncio.create_task(served.ask(USER))
        await sampler.asked.wait()
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        sampler.gate.set()
        status, body = await served.ask(USER, headers={"x-stainless-retry-count": "1"})
        record = await served.close()
    assert (status, message_of(body)["content"]) == (200, "a")
    assert len(sampler.inner.requests) == len(record.nodes) == 1


async def test_equal_calls_at_the_same_time_are_drawn_apart_and_the_second_is_a_retry(serve, gated):
    sampler = gated("a", "b")
    async with serve([], sampler=sampler) as served:
        async with asyncio.TaskGroup() as calls:
            calls.create_task(served.ask(USER))
            calls.create_task(served.ask(USER))
            while sampler.waiting < 2:
                await sampler.asked.wait()
                sampler.asked.clear()
            sampler.gate.set()
        record = await served.close()
    assert [(node.parent, node.edge) for node in record.nodes] == [(None, Edge.ROOT), (None, Edge.RETRY)]
    assert {request.request_id for request in sampler.inner.requests} == {"s/0", "s/1"}


async def test_calls_in_flight_are_given_up_when_the_session_closes(serve, gated):
    sampler = gated("a")
    async with serve([], sampler=sampler) as served:
        call = asyncio.create_task(served.ask(USER))
        await sampler.asked.wait()
        record = await served.close()
        status, body = await call
    assert (status, code(body)) == (404, "session_closed")
    assert (record.nodes, record.metrics["gateway/calls_abandoned"]) == ((), 1)


async def test_a_slow_stream_is_kept_alive_and_says_its_error_in_the_stream(serve, gated):
    sampler = gated(SamplerError("down"))
    async with serve([], sampler=sampler, keep_alive_s=0.01) as served:
        body = {"messages": [USER], "stream": True}
        async with served.client.post(f"{served.url}/chat/completions", json=body) as response:
            assert response.status == 200
            assert await response.content.readline() == b": keep-alive\n"
            sampler.gate.set()
            rest = await response.content.read()
    events = [line for line in rest.split(b"\n") if line.startswith(b"data:")]
    assert code(json.loads(events[-1][5:])) == "model_unavailable"


async def test_a_stream_is_told_when_its_session_closes_and_may_be_left_at_any_time(serve, gated):
    sampler = gated("a")
    async with serve([], sampler=sampler, keep_alive_s=0.01) as served:
        url, body = f"{served.url}/chat/completions", {"messages": [USER], "stream": True}
        async with served.client.post(url, json=body) as response:
            await response.content.readline()
        async with served.client.post(url, json=body, headers={"x-stainless-retry-count": "1"}) as response:
            await response.content.readline()
            record = await served.close()
            rest = await response.content.read()
    assert b"session_closed" in rest
    assert (record.num_calls, record.metrics["gateway/replays"]) == (1, 1)


async def test_a_stream_that_fails_early_has_the_errors_status(serve):
    async with serve([SamplerError("down")]) as served:
        status, body = await served.ask(USER, stream=True)
    assert (status, code(body)) == (503, "model_unavailable")


async def test_malformed_tool_calls_are_counted(serve):
    async with serve(["<tool_call>oops</tool_call>"]) as served:
        _, body = await served.ask(USER)
        record = await served.close()
    assert message_of(body) == {"role": "assistant", "content": "<tool_call>oops</tool_call>"}
    assert record.metrics["gateway/tool_parse_errors"] == 1


async def test_other_paths_and_large_bodies_are_refused_in_the_envelope(serve):
    async with serve([]) as served:
        async with served.client.get(f"{served.url}/nothing") as response:
            assert (response.status, code(await response.json())) == (404, "not_served")
        async with served.client.post(f"{served.url}/chat/completions", data=io.BytesIO(b"x" * (5 << 20))) as response:
            assert (response.status, code(await response.json())) == (413, "request_too_large")


async def test_a_port_in_use_is_named():
    renderer = ChatMLRenderer(TOKENIZER)
    gateway = Gateway(sampler=ScriptedSampler([], tokenizer=TOKENIZER), renderer=renderer, context_length=100)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(HostError, match=str(taken.getsockname()[1])):
        await gateway.start(taken.getsockname()[1])
