# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalIterable=false, reportIndexIssue=false
"""OpenAI's own SDK, with its retries and its stream helper, is the judge of what Responses means."""

import json

import openai
import pytest
from openai.lib.responses_tool_runner import AsyncRegisteredFunction, AsyncResponsesToolRunner

from etude.errors import SamplerError, VersionUnavailableError
from etude.types import Edge, SamplingParams

TOOLS = [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}]
CALLS = (
    "<think>\nhm\n</think>\n\nI look. "
    '<tool_call>{"name": "shell", "arguments": {"command":  "ls"}}</tool_call>'
    '<tool_call>{"name": "shell", "arguments": {"command": "pwd"}}</tool_call>'
)
ASKED = {"model": "m", "input": "fix it", "tools": TOOLS}


def sdk(served, **options):
    return openai.AsyncOpenAI(base_url=served.url, api_key=served.key, **options)


def outputs_of(response):
    return [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "x"}
        for item in response.output
        if item.type in ("function_call", "custom_tool_call")
    ]


async def test_reasoning_text_and_parallel_tool_calls_round_trip_through_the_sdk(serve):
    async with serve([CALLS, "done"]) as served, sdk(served) as client:
        first = await client.responses.create(**ASKED)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (first.output[0].content[0].text, first.output_text, first.status) == ("hm", "I look.", "completed")
        assert first.output[2].arguments == '{"command":  "ls"}'
        history = [{"role": "user", "content": "fix it"}, *first.output, *outputs_of(first)]
        second = await client.responses.create(**ASKED | {"input": history})
        record = await served.close()
    assert second.output_text == "done"
    assert [(node.parent, node.edge) for node in record.nodes] == [(None, Edge.ROOT), (0, Edge.CONTINUATION)]
    assert second.usage.input_tokens == len(served.sampler.requests[1].prompt_ids)
    assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens


async def test_the_stream_helper_rebuilds_the_same_response_in_the_apis_order(serve):
    async with serve([CALLS, CALLS]) as served, sdk(served) as client:
        plain = await client.responses.create(**ASKED)
        async with client.responses.stream(**ASKED) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert streamed.output_text == plain.output_text
    assert [(item.type, getattr(item, "arguments", "")) for item in streamed.output] == [
        (item.type, getattr(item, "arguments", "")) for item in plain.output
    ]
    assert streamed.usage == plain.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [event.type.removeprefix("response.") for event in events] == [
        *["created", "in_progress"],
        *["output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"],
        *["output_item.added", "content_part.added", "output_text.delta", "output_text.done"],
        *["content_part.done", "output_item.done", *call, *call, "completed"],
    ]


async def test_what_a_stream_told_can_be_sent_back(serve):
    async with serve([CALLS, "done"]) as served, sdk(served) as client:
        async with client.responses.stream(**ASKED) as stream:
            first = await stream.get_final_response()
        history = [{"role": "user", "content": "fix it"}, *first.output, *outputs_of(first)]
        async with client.responses.stream(**ASKED | {"input": history}) as stream:
            assert (await stream.get_final_response()).output_text == "done"
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


async def test_a_custom_tool_is_called_with_its_text_and_a_malformed_call_told_as_it_is(serve):
    tools = [{"type": "custom", "name": "patch"}]
    good = '<tool_call>{"name": "patch", "arguments": {"input": "a \\"b\\""}}</tool_call>'
    bad = '<tool_call>{"name": "patch", "arguments": {"inptu": 1}}</tool_call>'
    async with serve([good, bad, "done"]) as served, sdk(served) as client:
        history = [{"role": "user", "content": "fix it"}]
        items = []
        for _ in range(3):
            async with client.responses.stream(model="m", input=history, tools=tools) as stream:
                response = await stream.get_final_response()
            items += response.output
            history += [*response.output, *outputs_of(response)]
        record = await served.close()
    assert [item.type for item in items] == ["custom_tool_call", "function_call", "message"]
    assert (items[0].input, items[1].arguments) == ('a "b"', '{"inptu": 1}')
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.CONTINUATION]


async def test_a_tool_of_a_namespace_is_called_there_and_its_call_sent_back_continues(serve):
    spawn = {"type": "function", "name": "spawn", "description": "Start it.", "parameters": {"type": "object"}}
    tools = [
        {
            "type": "namespace",
            "name": "agents",
            "description": "Others.",
            "tools": [spawn, {"type": "custom", "name": "p"}],
        },
        spawn | {"description": "Another."},
    ]
    calls = [("agents__spawn", {"task": "x"}), ("agents__p", {"input": "a"}), ("spawn", {})]
    drawn = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': told})}</tool_call>" for name, told in calls)
    params = SamplingParams(max_tokens=400)
    async with serve([drawn, "done"], params=params) as served, sdk(served) as client:
        history = [{"role": "user", "content": "fix it"}]
        async with client.responses.stream(model="m", input=history, tools=tools) as stream:
            response = await stream.get_final_response()
        await client.responses.create(model="m", input=[*history, *response.output, *outputs_of(response)], tools=tools)
        record = await served.close()
    assert [(item.type, item.name, item.namespace) for item in response.output] == [
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "p", "agents"),
        ("function_call", "spawn", None),
    ]
    assert [tool["function"]["name"] for tool in record.tools] == ["agents__spawn", "agents__p", "spawn"]
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION]


@pytest.mark.parametrize("error", [SamplerError("down"), VersionUnavailableError("not yet")])
async def test_the_sdk_tries_again_by_itself_while_the_model_is_away(serve, error):
    async with serve([error, "a"]) as served, sdk(served, max_retries=1) as client:
        answer = await client.responses.create(**ASKED)
        record = await served.close()
    assert answer.output_text == "a"
    assert (record.failure, len(record.nodes)) == (None, 1)


async def test_permanent_errors_are_raised_without_a_second_try(serve):
    async with serve([CALLS], max_calls=1, context_length=400) as served, sdk(served, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.responses.create(model="m", input="x" * 500)
        assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(**ASKED, previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
        await client.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError) as limit:
            await client.responses.create(**ASKED)
        assert limit.value.code == "session_limit_reached"
        await served.close()
        with pytest.raises(openai.BadRequestError) as closed:
            await client.responses.create(**ASKED)
        assert closed.value.code == "session_closed"
    assert len(served.sampler.requests) == 1


async def test_an_error_that_comes_late_is_a_failed_response(serve, gated):
    sampler = gated("a", SamplerError("down"), VersionUnavailableError("not yet"), takes_s=0.05)
    async with serve([], sampler=sampler, keep_alive_s=0.01) as served, sdk(served, max_retries=0) as client:
        async with client.responses.stream(**ASKED) as stream:
            assert (await stream.get_final_response()).output_text == "a"
        for code in ("server_error", "rate_limit_exceeded"):
            async with client.responses.stream(**ASKED) as stream:
                events = [event async for event in stream]
            assert [event.type for event in events] == ["response.created", "response.failed"]
            assert events[-1].response.error.code == code


async def test_an_answer_cut_short_is_incomplete(serve):
    async with serve([[65] * 300], context_length=300) as served, sdk(served) as client:
        response = await client.responses.create(**ASKED)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    async with serve([[65] * 300], context_length=300) as served, sdk(served) as client:
        async with client.responses.stream(**ASKED) as stream:
            events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"


async def test_models_are_listed_as_openai_does(serve):
    async with serve([]) as served, sdk(served) as client:
        assert [model.id async for model in client.models.list()] == ["etude"]
        assert (await client.models.retrieve("gpt-x")).id == "gpt-x"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()


async def test_the_sdks_own_tool_runner_gets_through_a_task(serve):
    async def shell(arguments):
        return f"ran {arguments}"

    tool = AsyncRegisteredFunction({"type": "function", "name": "shell", "parameters": {}, "strict": False}, shell)
    for stream in (False, True):
        async with serve([CALLS, CALLS, "done"]) as served, sdk(served) as client:
            runner = AsyncResponsesToolRunner(functions=[tool])
            last = await runner.run(client, {"model": "m", "input": "fix it"}, stream=stream)
            record = await served.close()
        assert last.output_text == "done"
        assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.CONTINUATION]
