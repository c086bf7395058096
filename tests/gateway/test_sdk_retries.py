# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""What the SDKs do by themselves when an answer takes too long: nothing may be drawn twice for it."""

import anthropic
import openai
import pytest

from etude.types import Edge

USER = {"role": "user", "content": "fix it"}
ANTHROPIC = {"model": "m", "max_tokens": 9, "messages": [USER]}


def open_ai(served, **options):
    return openai.AsyncOpenAI(base_url=served.url, api_key=served.key, **options)


def of_anthropic(served, **options):
    return anthropic.AsyncAnthropic(base_url=served.url.removesuffix("/v1"), api_key=served.key, **options)


async def chat(client):
    return (await client.chat.completions.create(model="m", messages=[USER])).choices[0].message.content


async def responses(client):
    return (await client.responses.create(model="m", input=[USER])).output_text


async def responses_stream(client):
    async with client.responses.stream(model="m", input=[USER]) as stream:
        return (await stream.get_final_response()).output_text


async def messages(client):
    return (await client.messages.create(**ANTHROPIC)).content[0].text


async def messages_stream(client):
    async with client.messages.stream(**ANTHROPIC) as stream:
        return await stream.get_final_text()


@pytest.mark.parametrize(
    ("sdk", "call"),
    [
        (open_ai, chat),
        (open_ai, responses),
        (open_ai, responses_stream),
        (of_anthropic, messages),
        (of_anthropic, messages_stream),
    ],
)
async def test_a_call_that_the_sdk_gives_up_and_repeats_is_drawn_once(serve, gated, sdk, call):
    sampler = gated("a", "b", takes_s=0.6)
    async with serve([], sampler=sampler) as served, sdk(served, max_retries=9, timeout=0.3) as client:
        assert await call(client) == "a"
        record = await served.close()
    assert sampler.waiting == 1
    assert [node.edge for node in record.nodes] == [Edge.ROOT]
    assert record.metrics["gateway/replays"] >= 1
