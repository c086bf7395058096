# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false, reportOptionalIterable=false
"""The official SDK is the judge of what Chat Completions means."""

import openai
import pytest

from etude.errors import SamplerError, VersionUnavailableError

USER = {"role": "user", "content": "fix it"}
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
CALLS = (
    'I look. <tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>'
    '<tool_call>{"name": "shell", "arguments": {"command": "pwd"}}</tool_call>'
)


def sdk(served, **options):
    return openai.AsyncOpenAI(base_url=served.url, api_key=served.key, **options)


async def test_tool_calls_round_trip_through_the_sdk(serve):
    async with serve([CALLS, "done"]) as served, sdk(served) as client:
        first = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert (message.content, len({call.id for call in message.tool_calls})) == ("I look.", 2)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
        second = await client.chat.completions.create(model="m", messages=[USER, message, *results], tools=TOOLS)
        assert second.choices[0].message.content == "done"
        assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
        record = await served.close()
    assert [node.parent for node in record.nodes] == [None, 0]


async def test_the_sdks_stream_helper_rebuilds_the_same_message(serve):
    async with serve([CALLS, CALLS]) as served, sdk(served) as client:
        plain = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        options = {"include_usage": True}
        async with client.chat.completions.stream(
            model="m", messages=[USER], tools=TOOLS, stream_options=options
        ) as stream:
            streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.content == plain.choices[0].message.content
    functions = [
        [(call.function.name, call.function.arguments) for call in completion.choices[0].message.tool_calls]
        for completion in (plain, streamed)
    ]
    assert functions[0] == functions[1]
    assert streamed.usage == plain.usage
    assert streamed.choices[0].finish_reason == "tool_calls"


async def test_reasoning_is_given_beside_the_text(serve):
    async with serve(["<think>\nhm\n</think>\n\nyes", "next"]) as served, sdk(served) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("yes", "hm")
        # Most harnesses drop the reasoning; the branch keeps its tokens.
        spoken = {"role": "assistant", "content": message.content}
        await client.chat.completions.create(model="m", messages=[USER, spoken, USER])
        record = await served.close()
    assert record.nodes[1].parent == 0


@pytest.mark.parametrize("error", [SamplerError("down"), VersionUnavailableError("not yet")])
async def test_the_sdk_tries_again_by_itself_while_the_sampler_is_away(serve, error):
    async with serve([error, "a"]) as served, sdk(served, max_retries=1) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
        record = await served.close()
    assert answer.choices[0].message.content == "a"
    assert (record.failure, len(record.nodes)) == (None, 1)


async def test_permanent_errors_are_raised_without_a_second_try(serve):
    async with serve([CALLS], max_calls=1, context_length=400) as served, sdk(served, max_retries=2) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as overflow:
            await create(model="m", messages=[{"role": "user", "content": "x" * 500}])
        assert overflow.value.code == "context_length_exceeded"
        await create(model="m", messages=[USER])
        with pytest.raises(openai.NotFoundError) as limit:
            await create(model="m", messages=[USER])
        assert limit.value.code == "session_limit_reached"
        await served.close()
        with pytest.raises(openai.NotFoundError) as closed:
            await create(model="m", messages=[USER])
        assert closed.value.code == "session_closed"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(model="m", messages=[USER])
    assert len(served.sampler.requests) == 1
