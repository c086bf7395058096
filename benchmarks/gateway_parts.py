"""The processes of the gateway's benchmarks: a fake engine, a gateway, and harnesses that call it.

Each is started as `python gateway_parts.py ROLE JSON`, prints one JSON line once it is ready, and another one when its
work is done or its standard input ends.
"""

import asyncio
import json
import math
import os
import random
import resource
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.gateway.collector import collect_rarely
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.sampling.client import SamplerClient
from etude.sampling.router import SamplerRouter
from etude.types import Completion, FinishReason, SamplingParams, Support, VersionRun

DRAWN, SUPPORT, RESULT_BYTES = 64, 8, 600


def wide_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer whose ids are as large as those of real ones: Python keeps small numbers once."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = {f"<unused {number}>": number for number in range(100_000)}
    vocab = others | {character: 100_000 + index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(specials)  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


TOKENIZER = wide_tokenizer()
TEXT = "x" * (DRAWN - 1)
ANSWER = tuple(TOKENIZER.encode(f"{TEXT}<|im_end|>").ids)
SYSTEM = {"role": "system", "content": "Repair the module. " * 20}
USER = {"role": "user", "content": "The tests fail. " * 20}


def completion() -> Completion:
    """Return what the engine always draws, with a support of some ids for each token."""
    ids = [sorted({token, *range(1000, 1000 + SUPPORT - 1)}) for token in ANSWER]
    flat = [token for row in ids for token in row]
    half = math.log(1 / SUPPORT)
    return Completion(
        token_ids=ANSWER,
        sampler_logprobs=struct.pack(f"<{DRAWN}f", *[half] * DRAWN),
        versions=(VersionRun(0, DRAWN),),
        finish_reason=FinishReason.STOP,
        pool="fake",
        support=Support(
            counts=struct.pack(f"<{DRAWN}H", *[SUPPORT] * DRAWN),
            token_ids=struct.pack(f"<{len(flat)}I", *flat),
            logprobs=struct.pack(f"<{len(flat)}f", *[half] * len(flat)),
        ),
    )


async def engine(*, delay_s: float) -> None:
    """Answer etude's samplers' protocol and OpenAI's, each call after `delay_s`, and count the tokens drawn."""
    drawn = [0]
    told = msgspec.msgpack.encode(completion())
    usage = {"prompt_tokens": 1, "completion_tokens": DRAWN, "total_tokens": DRAWN + 1}
    choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
    chat = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

    async def answer(request: web.Request, body: bytes, content_type: str) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        drawn[0] += DRAWN
        return web.Response(body=body, content_type=content_type)

    async def sample(request: web.Request) -> web.Response:
        return await answer(request, told, "application/msgpack")

    async def complete(request: web.Request) -> web.Response:
        return await answer(request, json.dumps(chat).encode(), "application/json")

    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post("/sample", sample), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    say(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await until_told()
    say(drawn=drawn[0])


async def gateway(*, sampler: str, sessions: int) -> None:
    """Serve sessions that are open already; in the end, close them and tell what they hold."""
    async with SamplerClient(sampler) as client:
        service = Gateway(
            sampler=SamplerRouter([client]),
            renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"),
            context_length=1 << 20,
        )
        await service.start()
        names = [f"session {number}" for number in range(sessions)]
        keys = [await service.open(spec(name)) for name in names]
        collect_rarely()
        say(url=f"http://127.0.0.1:{service.port}", keys=keys)
        await until_told()
        used, kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        records = [await service.close(name) for name in names]
        nodes = [node for record in records for node in record.nodes]
        say(
            cpu_s=used,
            peak_mib=kib / 1024,
            nodes=len(nodes),
            linked=sum(node.parent is not None for node in nodes),
            drawn=sum(len(node.completion.token_ids) for node in nodes),
            tokens=sum(len(node.completion.token_ids) + len(node.prompt_ids) for node in nodes),
            failures=sum(record.failure is not None for record in records),
        )
        await service.stop()


def spec(name: str, *, calls: int = 1 << 20) -> SessionSpec:
    """Return a session without limits that matter."""
    return SessionSpec(
        session_id=name,
        purpose="train",
        seed=0,
        params=SamplingParams(max_tokens=DRAWN),
        max_calls=calls,
        max_session_tokens=1 << 30,
    )


async def harnesses(*, url: str, keys: list[str], every_s: float, seconds: float) -> None:
    """Let each session call every `every_s` seconds, whether or not others are late; 0 is as soon as it can."""
    started = time.perf_counter() + 0.5
    took: list[float] = []
    late: list[float] = []
    drawn = 0
    failed = 0
    bodies = len(json.dumps(SYSTEM) + json.dumps(USER))
    say(body_bytes=bodies)

    async def converse(http: aiohttp.ClientSession, number: int, key: str) -> None:
        nonlocal drawn, failed
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        dice = random.Random(number)
        # What was said is encoded once: a client that encodes all of it again and again is what would be measured.
        said = json.dumps(SYSTEM) + "," + json.dumps(USER)
        due = started + every_s * number / len(keys)
        while due < started + seconds and time.perf_counter() < started + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent = time.perf_counter()
            data = f'{{"model":"m","messages":[{said}]}}'.encode()
            status, body = 0, b""
            with suppress(TimeoutError, aiohttp.ClientError):
                async with http.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
                    status, body = response.status, await response.read()
            took.append(time.perf_counter() - sent)
            late.append(sent - due)
            due = due + every_s if every_s else time.perf_counter()
            if status != 200:
                failed += 1
                continue
            told = json.loads(body)
            drawn += told["usage"]["completion_tokens"]
            said += "," + json.dumps(told["choices"][0]["message"])
            content = f"{dice.random()} " + "FAILED " * (RESULT_BYTES // 7)
            said += "," + json.dumps({"role": "user", "content": content})

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http:
        await asyncio.gather(*[converse(http, number, key) for number, key in enumerate(keys)])
    elapsed = time.perf_counter() - started
    say(calls=len(took), failed=failed, drawn=drawn, seconds=elapsed, took=took, late=late)


def say(**what: object) -> None:
    """Tell whoever started this process."""
    print(json.dumps(what), flush=True)


async def until_told() -> None:
    """Return when the standard input says something, or ends."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


class Part:
    """One process; an async context manager that ends it."""

    def __init__(self, role: str, *, script: str = __file__, nice: int = 0, **options: object) -> None:
        self._command = [sys.executable, script, role, json.dumps(options)]
        self._nice = nice
        self.ready: dict[str, Any] = {}

    async def __aenter__(self) -> "Part":
        pipe = asyncio.subprocess.PIPE
        command = ["nice", "-n", str(self._nice), *self._command] if self._nice else self._command
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 28)
        self.ready = await self._line()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def result(self) -> dict[str, Any]:
        """Let it finish, and return what it says."""
        assert self._process.stdin is not None
        # One that ends by itself may have ended.
        with suppress(ConnectionError):
            self._process.stdin.write(b"\n")
            await self._process.stdin.drain()
        return await self._line()

    def cpu_s(self) -> float:
        """Return the processor seconds that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command[2]} ended early")
        return json.loads(line)


def run_role(roles: dict[str, Any]) -> None:
    """Be the process that the command line asks for."""
    asyncio.run(roles[sys.argv[1]](**json.loads(sys.argv[2])))


if __name__ == "__main__":
    run_role({"engine": engine, "gateway": gateway, "harnesses": harnesses})
