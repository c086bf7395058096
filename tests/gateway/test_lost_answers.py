# pyright: basic, reportArgumentType=false
"""Connections that break before the answer is there, of clients that do not mark what they repeat."""

import asyncio
import json

import pytest

from etude.errors import SamplerError
from etude.types import Edge

USER = {"role": "user", "content": "fix it"}


async def hang_up(served, sampler, **fields):
    """Ask with a connection of its own, and break it while the model draws."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
    body = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {served.key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    sampler.asked.clear()
    await sampler.asked.wait()
    writer.transport.abort()
    await pass_by(served)


async def pass_by(served):
    """Let the gateway, which shares this loop, take notice of what happened before."""
    async with served.client.get(f"{served.url}/models") as response:
        assert response.status == 200


async def test_whoever_comes_back_while_the_model_still_draws_waits_for_what_it_draws(serve, gated):
    sampler = gated("a", "b")
    async with serve([], sampler=sampler) as served:
        await hang_up(served, sampler)
        asking = asyncio.create_task(served.ask(USER))
        await pass_by(served)
        sampler.gate.set()
        _, body = await asking
        await served.close()
    assert (sampler.waiting, body["choices"][0]["message"]["content"]) == (1, "a")


@pytest.mark.parametrize("first", [{}, {"stream": True}], ids=["plain", "stream"])
@pytest.mark.parametrize("again", [{}, {"stream": True}], ids=["plain", "stream"])
async def test_whoever_hung_up_while_the_model_drew_gets_what_it_drew(serve, gated, first, again):
    sampler = gated("a", "b")
    async with serve([], sampler=sampler, keep_alive_s=0.01) as served:
        await hang_up(served, sampler, **first)
        sampler.gate.set()
        asked = {"messages": [USER], **again}
        async with served.client.post(f"{served.url}/chat/completions", json=asked) as response:
            assert response.status == 200
            assert '"a"' in (await response.text()).replace(" ", "")
        record = await served.close()
    assert (sampler.waiting, [node.edge for node in record.nodes]) == (1, [Edge.ROOT])
    assert record.metrics["gateway/replays"] == 1


async def test_the_answer_is_kept_for_who_comes_back_after_it_was_drawn_and_only_for_the_first(serve, gated):
    sampler = gated("a", "b")
    async with serve([], sampler=sampler) as served:
        await hang_up(served, sampler)
        sampler.gate.set()
        answers = [(await served.ask(USER))[1]["choices"][0]["message"]["content"] for _ in range(2)]
        record = await served.close()
    assert answers == ["a", "b"]
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.RETRY]


async def test_two_clients_that_are_there_are_two_calls(serve, gated):
    sampler = gated("a", "b")
    async with serve([], sampler=sampler) as served:
        asking = [asyncio.create_task(served.ask(USER)) for _ in range(2)]
        while sampler.waiting < 2:
            sampler.asked.clear()
            await sampler.asked.wait()
        sampler.gate.set()
        answers = [body["choices"][0]["message"]["content"] for _, body in await asyncio.gather(*asking)]
        await served.close()
    assert sorted(answers) == ["a", "b"]


async def test_a_failure_is_not_repeated(serve, gated):
    sampler = gated(SamplerError("away"), "b")
    async with serve([], sampler=sampler) as served:
        await hang_up(served, sampler)
        sampler.gate.set()
        await pass_by(served)
        status, body = await served.ask(USER)
        record = await served.close()
    assert (status, body["choices"][0]["message"]["content"]) == (200, "b")
    assert (len(record.nodes), record.failure) == (1, None)
