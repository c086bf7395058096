# pyright: basic
"""A gateway on a real port, over a scripted sampler."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.types import SamplingParams

TOKENIZER = byte_tokenizer()


class GatedSampler:
    """Answers when it is told to, or `takes_s` seconds after it is asked."""

    def __init__(self, *answers, takes_s=None):
        self.takes_s = takes_s
        self.inner = ScriptedSampler(answers, tokenizer=TOKENIZER)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()
        self.waiting = 0
        self.request = None

    async def sample(self, request):
        self.waiting += 1
        self.request = request
        self.asked.set()
        if self.takes_s is not None:
            self.gate.clear()
            asyncio.get_running_loop().call_later(self.takes_s, self.gate.set)
        await self.gate.wait()
        return await self.inner.sample(request)

    async def status(self):
        return await self.inner.status()


class Served:
    """A gateway, its sampler, one open session and a client that has its key."""

    def __init__(self, gateway, sampler, client, key, spec):
        self.gateway, self.sampler, self.client, self.key, self.spec = gateway, sampler, client, key, spec
        self.url = f"http://127.0.0.1:{gateway.port}/v1"

    async def ask(self, *messages, headers=None, **fields):
        """Return status and decoded body of a call."""
        body = {"model": "m", "messages": list(messages), **fields}
        async with self.client.post(f"{self.url}/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def close(self):
        return await self.gateway.close(self.spec.session_id)


@asynccontextmanager
async def serving(
    answers, *, sampler=None, renderer=None, context_length=2000, keep_alive_s=10.0, call_timeout_s=60.0, **spec
):
    sampler = sampler or ScriptedSampler(answers, tokenizer=TOKENIZER)
    gateway = Gateway(
        sampler=sampler,
        renderer=renderer or ChatMLRenderer(TOKENIZER, "chatml-compact"),
        context_length=context_length,
        keep_alive_s=keep_alive_s,
        call_timeout_s=call_timeout_s,
    )
    fields = {"session_id": "s", "purpose": "train", "seed": 7, "max_calls": 20, "max_session_tokens": 2000}
    spec = SessionSpec(**{**fields, "params": SamplingParams(max_tokens=200), **spec})
    async with AsyncExitStack() as stack:
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        key = await gateway.open(spec)
        client = await stack.enter_async_context(aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}))
        yield Served(gateway, sampler, client, key, spec)


@pytest.fixture
def serve():
    return serving


@pytest.fixture
def gated():
    return GatedSampler
