# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalIterable=false, reportIndexIssue=false, reportOptionalSubscript=false
"""Anthropic's own SDK, with its retries, streams and tool runner, is the judge of what Messages means."""

import anthropic
import pytest

from etude.errors import SamplerError, VersionUnavailableError
from etude.types import Edge, SamplingParams

USER = {"role": "user", "content": "fix it"}
TOOLS = [{"name": "shell", "input_schema": {"type": "object"}}]
CALLS = (
    "<think>\nhm\n</think>\n\nI look. "
    '<tool_call>{"name": "shell", "arguments": {"command": "ls",  "n": 1.0}}</tool_call>'
    '<tool_call>{"name": "shell", "arguments": {"command": "pwd"}}</tool_call>'
)
ASKED = {"model": "m", "max_tokens": 400, "messages": [USER], "tools": TOOLS}


def sdk(served, **options):
    return anthropic.AsyncAnthropic(base_url=served.url.removesuffix("/v1"), api_key=served.key, **options)


def code(caught):
    return caught.value.body["error"]["details"]["error_code"]


def results_of(message):
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "x"}
        for block in message.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": results}


async def test_thinking_text_and_parallel_tool_calls_round_trip_through_the_sdk(serve):
    async with serve([CALLS, "done"]) as served, sdk(served) as client:
        first = await client.messages.create(**ASKED)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text, first.stop_reason) == ("hm", "I look.", "tool_use")
        assert [block.input for block in first.content[2:]] == [{"command": "ls", "n": 1.0}, {"command": "pwd"}]
        spoken = {"role": "assistant", "content": first.content}
        second = await client.messages.create(**ASKED | {"messages": [USER, spoken, results_of(first)]})
        assert (second.content[0].text, second.stop_reason) == ("done", "end_turn")
        record = await served.close()
    assert [(node.parent, node.edge) for node in record.nodes] == [(None, Edge.ROOT), (0, Edge.CONTINUATION)]
    used = second.usage
    assert used.input_tokens + used.cache_read_input_tokens == len(served.sampler.requests[1].prompt_ids)
    assert used.output_tokens == len(record.nodes[1].completion.token_ids)


async def test_the_stream_helper_rebuilds_the_same_message_in_the_apis_order(serve):
    async with serve([CALLS, CALLS]) as served, sdk(served) as client:
        plain = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    told = [[block.model_dump(exclude={"id", "signature"}) for block in one.content] for one in (plain, streamed)]
    assert told[0] == told[1]
    assert streamed.content[0].signature
    assert (streamed.usage, streamed.stop_reason) == (plain.usage, "tool_use")
    raw = [kind for kind in kinds if kind.startswith(("message", "content_block"))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], block[1], block[2]]
    assert raw == ["message_start", *thinking, *block * 3, "message_delta", "message_stop"]


async def test_the_sdks_own_tool_runner_gets_through_a_task(serve):
    @anthropic.beta_async_tool
    async def shell(command: str, n: float = 0) -> str:
        """Run a command."""
        return f"ran {command}"

    for stream in (False, True):
        async with serve([CALLS, CALLS, "done"]) as served, sdk(served) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=400, messages=[USER], tools=[shell], stream=stream
            )
            last = await runner.until_done()
            record = await served.close()
        assert last.content[0].text == "done"
        assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.CONTINUATION]
        assert [message["role"] for message in record.messages].count("tool") == 4


async def test_tokens_are_counted_as_the_next_call_will_have_them_and_nothing_is_recorded(serve):
    async with serve(["a", "b"]) as served, sdk(served) as client:
        asked = {"model": "m", "messages": [USER], "tools": TOOLS, "system": "be brief"}
        counted = await client.messages.count_tokens(**asked)
        first = await client.messages.create(max_tokens=9, **asked)
        longer = asked | {"messages": [USER, {"role": "assistant", "content": first.content}, USER]}
        counted_again = await client.messages.count_tokens(**longer)
        second = await client.messages.create(max_tokens=9, **longer)
        huge = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x" * (1 << 19)}])
        record = await served.close()
    assert (counted.input_tokens, counted_again.input_tokens) == (first.usage.input_tokens, second.usage.input_tokens)
    assert huge.input_tokens > 2000, "so long a prompt is not even encoded"
    assert (record.num_calls, record.truncated) == (2, "")


@pytest.mark.parametrize("error", [SamplerError("down"), VersionUnavailableError("not yet")])
async def test_the_sdk_tries_again_by_itself_while_the_model_is_away(serve, error):
    async with serve([error, "a"]) as served:
        async with sdk(served, max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(**ASKED)
        assert (caught.value.status_code, caught.value.response.headers["Retry-After"]) == (529, "1")
        assert caught.value.body["error"]["type"] == "overloaded_error"
    async with serve([error, "a"]) as served, sdk(served, max_retries=1) as client:
        answer = await client.messages.create(**ASKED)
        record = await served.close()
    assert answer.content[0].text == "a"
    assert (record.failure, len(record.nodes)) == (None, 1)


async def test_permanent_errors_are_raised_in_anthropics_envelope_without_a_second_try(serve):
    async with serve([CALLS], max_calls=1, context_length=400) as served, sdk(served, max_retries=2) as client:
        too_long = ASKED | {"messages": [{"role": "user", "content": "x" * 500}]}
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 399 maximum"
        ) as overflow:
            await client.messages.create(**too_long)
        assert overflow.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await client.messages.create(**ASKED, tool_choice={"type": "any"})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        await client.messages.create(**ASKED)
        with pytest.raises(anthropic.PermissionDeniedError) as limit:
            await client.messages.create(**ASKED)
        assert code(limit) == "session_limit_reached"
        await served.close()
        for call in (client.messages.create, client.messages.count_tokens):
            with pytest.raises(anthropic.PermissionDeniedError) as closed:
                await call(**{name: ASKED[name] for name in ("model", "messages")}, **MAX[call.__name__])
            assert code(closed) == "session_closed"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**ASKED)
    assert len(served.sampler.requests) == 1


MAX = {"create": {"max_tokens": 9}, "count_tokens": {}}


async def test_an_error_that_comes_late_ends_the_stream_and_pings_do_not(serve, gated):
    sampler = gated("a", SamplerError("down"), takes_s=0.05)
    async with serve([], sampler=sampler, keep_alive_s=0.01) as served, sdk(served, max_retries=0) as client:
        async with client.messages.stream(**ASKED) as stream:
            assert await stream.get_final_text() == "a"
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
    assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_an_answer_cut_short_says_so_and_is_continued(serve):
    async with serve(["a" * 60, "b"], params=SamplingParams(max_tokens=5)) as served, sdk(served) as client:
        first = await client.messages.create(**ASKED)
        assert first.stop_reason == "max_tokens"
        await client.messages.create(**ASKED | {"messages": [USER, {"role": "assistant", "content": "aaaaa"}, USER]})
        record = await served.close()
    assert record.nodes[1].edge is Edge.CONTINUATION


async def test_models_are_listed_as_anthropic_does(serve):
    async with serve([]) as served, sdk(served) as client:
        assert [model.id async for model in client.models.list()] == ["etude"]
        assert (await client.models.retrieve("claude-x")).display_name == "claude-x"
