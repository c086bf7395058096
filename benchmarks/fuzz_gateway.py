"""Mutated requests over the three dialects: no crash, no 5xx that was not injected, no byte of another session.

    python benchmarks/fuzz_gateway.py [--requests N] [--seed S] [--workers W] [--sockets SHARE] [--json FILE]

Well-formed conversations are broken in every way that a generator thinks of: values of other types, huge and odd
numbers, deep nesting, missing and repeated pieces, cut and flipped bytes, other headers, keys and paths. Several
clients at once have a session each; all that a session says and is told bears its own mark, and a mark of another in an
answer or in a session's record is counted as a leak. The sampler fails now and then; only then may an answer be a 5xx.
A share of the requests comes through sockets, and some of those clients hang up in the middle; the others are handed to
what stands behind the port. In the end every session must close with a record that can be written down.
"""

import argparse
import asyncio
import json
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from urllib.parse import unquote

import aiohttp
import msgspec
from multidict import CIMultiDict

from etude.errors import SamplerError, VersionUnavailableError
from etude.gateway.door import Head
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.types import Completion, SampleRequest, SamplerStatus, SamplingParams

TOKENIZER = byte_tokenizer()
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
MARK = re.compile(rb"mark-[0-9a-f]{16}")
CLIENTS, CALLS_PER_SESSION = 16, 40
INJECTED = 0.02
ODD: tuple[object, ...] = (
    None, True, 0, -1, 1 << 63, 10**40, 1e308, -0.0, "", "auto", "\ud800", "\x00", "x" * 5000, [], {}, [[]],
    [None], {"type": "text"}, {"type": "text", "text": "t"}, {"type": "image"}, ["a"] * 50, {"": {}},
)  # fmt: skip


class FaultySampler:
    """Answers with the mark of the session that asks, as text, reasoning, calls or noise; fails at times."""

    def __init__(self, seed: int) -> None:
        self.marks: dict[str, str] = {}
        self.issued: set[str] = set()
        self.injected = 0
        self._random = random.Random(seed)

    async def sample(self, request: SampleRequest) -> Completion:
        if self._random.random() < INJECTED:
            self.injected += 1
            raise self._random.choice((SamplerError("injected"), VersionUnavailableError("injected"), OSError()))
        mark = self.marks[request.session_id]
        call = f'<tool_call>{{"name": "shell", "arguments": {{"a": "{mark}", "n": 1.0}}}}</tool_call>'
        answers: tuple[str | list[int], ...] = (
            mark, f"<think>\n{mark}\n</think>\n\n{mark}", call, f"{mark} {call}{call}", f"<tool_call>{mark}", "",
            [self._random.randrange(400) for _ in range(self._random.randrange(1, 20))],
        )  # fmt: skip
        answer = self._random.choice(answers)
        return await ScriptedSampler([answer], tokenizer=TOKENIZER).sample(request)

    async def status(self) -> Sequence[SamplerStatus]:
        return []


def conversation(dialect: str, mark: str, dice: random.Random) -> dict[str, object]:
    """Return a well-formed body with a few turns."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    call_id, calls = f"call_{dice.randrange(9)}", dice.randrange(3)
    turns: list[dict[str, object]] = []
    body: dict[str, object] = {"model": "m", "stream": dice.random() < 0.4, "temperature": dice.random()}
    if dialect == "chat":
        turns = [{"role": "system", "content": mark}, {"role": "user", "content": [{"type": "text", "text": mark}]}]
        for _ in range(calls):
            call = {"id": call_id, "type": "function", "function": {"name": "shell", "arguments": '{"a": 1}'}}
            turns += [{"role": "assistant", "content": None, "tool_calls": [call, call], "reasoning_content": "r"}]
            turns += [{"role": "tool", "tool_call_id": call_id, "content": mark}] * 2
        tool = {"type": "function", "function": {"name": "shell", "description": "d", "parameters": schema}}
        return body | {"messages": turns, "tools": [tool], "stream_options": {"include_usage": True}, "n": 1}
    if dialect == "messages":
        turns = [{"role": "user", "content": [{"type": "text", "text": mark}]}]
        for _ in range(calls):
            blocks = [{"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": mark}]
            call = {"type": "tool_use", "id": call_id, "name": "shell", "input": {"a": [1, 2.5]}}
            result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": mark}]}
            turns += [{"role": "assistant", "content": [*blocks, call]}, {"role": "user", "content": [result, result]}]
        tool = {"name": "shell", "description": "d", "input_schema": schema}
        return body | {"system": [{"type": "text", "text": mark}], "messages": turns, "tools": [tool], "max_tokens": 9}
    turns = [
        {"role": "developer", "content": mark},
        {"role": "user", "content": [{"type": "input_text", "text": mark}]},
    ]
    for _ in range(calls):
        turns += [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": mark}]},
            {"type": "function_call", "call_id": call_id, "name": "shell", "arguments": '{"a": 1}'},
            {"type": "custom_tool_call", "call_id": call_id, "name": "patch", "input": mark},
            {"type": "function_call_output", "call_id": call_id, "output": mark},
        ]
    tools = [{"type": "function", "name": "shell", "parameters": schema}, {"type": "custom", "name": "patch"}]
    return body | {"instructions": mark, "input": turns, "tools": tools, "reasoning": {"effort": "low"}}


def mutate(value: object, dice: random.Random) -> object:
    """Return a value with one thing changed, somewhere in it."""
    at_leaf = not isinstance(value, (dict, list)) or not value or dice.random() < 0.1
    if at_leaf:
        deep: object = "x"
        for _ in range(dice.choice((0, 0, 40, 900))):
            deep = [deep] if dice.random() < 0.5 else {"a": deep}
        return deep if dice.random() < 0.1 else dice.choice((*ODD, value))
    if isinstance(value, dict):
        name = dice.choice(list(value))
        how = dice.randrange(6)
        if how == 0:
            return {key: item for key, item in value.items() if key != name}
        if how == 1:
            return value | {dice.choice((*value, "role", "type", "content", "thread", "x")): dice.choice(ODD)}
        return value | {name: mutate(value[name], dice)}
    index, how = dice.randrange(len(value)), dice.randrange(8)
    if how == 0:
        return value[:index] + value[index + 1 :]
    if how == 1:
        return value[:index] + [value[index]] * dice.choice((2, 3, 300)) + value[index + 1 :]
    if how == 2:
        return dice.sample(value, len(value))
    return [*value[:index], mutate(value[index], dice), *value[index + 1 :]]


def spoil(data: bytes, dice: random.Random) -> bytes:
    """Return bytes of which some are cut, flipped, repeated or foreign."""
    at, how = dice.randrange(len(data)), dice.randrange(5)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
    if how == 2:
        return data[:at] + data[at:][:200] * 2 + data[at:]
    if how == 3:
        wide = data.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass")
        return wide if dice.random() < 0.5 else b"\xef\xbb\xbf" + data
    return data[:at] + dice.choice((b"\xff", b"\\ud800", b"[" * 5000, b"1e999", b"NaN", b'"', b"\x00")) + data[at:]


def request_of(mark: str, dice: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Return path, body and headers of one request, most of them broken."""
    dialect = dice.choice(tuple(PATHS))
    body: object = conversation(dialect, mark, dice)
    for _ in range(dice.choice((0, 1, 1, 2, 5))):
        body = mutate(body, dice)
    data = json.dumps(body, ensure_ascii=dice.random() < 0.9).encode("utf-8", "surrogatepass")
    if dice.random() < 0.15:
        data = spoil(data, dice)
    path = PATHS[dialect if dice.random() < 0.95 else dice.choice(tuple(PATHS))]
    if dice.random() < 0.08:
        path += dice.choice(("/count_tokens", "/", "/x", "?beta=true", "/%00", "//"))
    headers = {"Content-Type": dice.choice(("application/json", "text/plain; charset=utf-7", "x"))}
    if dice.random() < 0.2:
        headers["x-stainless-retry-count"] = dice.choice(("0", "1", "x", ""))
    if dice.random() < 0.1:
        headers["Idempotency-Key"] = dice.choice(("k", "K" * 4000, "é"))
    if dice.random() < 0.1:
        headers["anthropic-version"] = "2023-06-01"
    return path, data, headers


class Complaints(logging.Handler):
    """Counts what the web server has to complain about."""

    def __init__(self, tally: Counter[str]) -> None:
        super().__init__(logging.ERROR)
        self.tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        self.tally["crashes"] += 1
        print(self.format(record))


class Client:
    """One harness without manners; its session is renewed when it has had enough calls."""

    def __init__(
        self, gateway: Gateway, sampler: FaultySampler, seed: int, tally: Counter[str], *, sockets: float
    ) -> None:
        self.gateway, self.sampler, self.tally, self.sockets = gateway, sampler, tally, sockets
        self.dice = random.Random(seed)
        self.name, self.key, self.mark, self.rounds = f"s{seed}", "", "", 0

    async def play(self, http: aiohttp.ClientSession, requests: int) -> None:
        for number in range(requests):
            if number % CALLS_PER_SESSION == 0:
                await self.renew()
            path, data, headers = request_of(self.mark, self.dice)
            await self.send(http, path, data, headers)
        await self.finish()

    async def renew(self) -> None:
        if self.key:
            await self.finish()
        self.rounds += 1
        self.mark = f"mark-{self.dice.getrandbits(64):016x}"
        session_id = f"{self.name}-{self.rounds}"
        self.sampler.marks[session_id] = self.mark
        self.sampler.issued.add(self.mark)
        self.key = await self.gateway.open(
            SessionSpec(
                session_id=session_id,
                purpose="train",
                seed=0,
                params=SamplingParams(max_tokens=400),
                max_calls=CALLS_PER_SESSION,
                max_session_tokens=20_000,
            )
        )

    async def finish(self) -> None:
        record = await self.gateway.close(f"{self.name}-{self.rounds}")
        self.look_for_others(msgspec.json.encode(record))
        if record.failure is not None and record.failure.component == "gateway":
            self.tally["gateway failures"] += 1
            print(record.failure.message)
        self.tally["nodes"] += len(record.nodes)

    async def send(self, http: aiohttp.ClientSession, path: str, data: bytes, headers: dict[str, str]) -> None:
        key = self.key if self.dice.random() < 0.97 else self.dice.choice(("", "sk-etude-x", f"{self.key}x"))
        how = self.dice.randrange(4)
        auth: dict[str, str] = {"Authorization": f"Bearer {key}"} if how == 0 else {}
        auth |= {"x-api-key": key} if how == 1 else {"x-goog-api-key": key} if how == 2 else {}
        where = f"/s/{key}{path}" if how == 3 else path
        by_socket = self.dice.random() < self.sockets
        told = await (self.over_http if by_socket else self.handed_over)(http, where, data, headers | auth)
        if told is None:
            return
        status, content = told
        self.tally["requests"] += 1
        self.tally[f"status {status}"] += 1
        self.look_for_others(content)
        if status >= 500:
            # The gateway says these two when the sampler failed, which it does by injection alone.
            self.tally["5xx not injected"] += not re.search(rb'"model_(busy|unavailable)"', content)
        if status != 200 and not self.is_enveloped(content):
            self.tally["no envelope"] += 1
            print(status, content[:200])

    async def over_http(
        self, http: aiohttp.ClientSession, path: str, data: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes] | None:
        """Return status and body; None when the client hangs up or the connection breaks."""
        self.tally["over sockets"] += 1
        try:
            url = f"http://127.0.0.1:{self.gateway.port}{path}"
            async with http.post(url, data=data, headers=headers) as response:
                if self.dice.random() < 0.1:
                    self.tally["hung up"] += 1
                    return None
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            self.tally["broken connections"] += 1
            print(f"{type(error).__name__}: {error}")
            return None

    async def handed_over(
        self, _: aiohttp.ClientSession, path: str, data: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Return status and body that the port would send."""

        async def read(owner: str) -> bytes:
            del owner
            return data

        plain = unquote(path.partition("?")[0])
        hangs_up = self.dice.random() < 0.02
        head = Head(method="POST", path=plain, headers=CIMultiDict(headers), is_gone=lambda: hangs_up)
        reply = await self.gateway.api.answer(head, read)
        content = reply.body if reply.parts is None else b"".join([part async for part in reply.parts])
        if reply.on_sent is not None and not hangs_up:
            reply.on_sent()
        return reply.status, content

    def look_for_others(self, told: bytes) -> None:
        # A mark that a mutation has changed is nobody's.
        found = {mark.decode() for mark in MARK.findall(told)} - {self.mark}
        self.tally["leaks"] += bool(found & self.sampler.issued)

    @staticmethod
    def is_enveloped(told: bytes) -> bool:
        try:
            return isinstance(json.loads(told)["error"]["message"], str)
        except (ValueError, KeyError, TypeError):
            return False


async def fuzz(*, requests: int, seed: int, sockets: float = 1.0) -> dict[str, float]:
    """Return what was counted; `bad` is how often a promise was broken."""
    sampler, tally = FaultySampler(seed), Counter[str]()
    logging.getLogger().addHandler(Complaints(tally))
    gateway = Gateway(
        sampler=sampler,
        renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"),
        context_length=8000,
        keep_alive_s=0.05,
    )
    await gateway.start()
    started = time.perf_counter()
    clients = [
        Client(gateway, sampler, seed * 1000 + index, tally, sockets=sockets) for index in range(min(CLIENTS, requests))
    ]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        shares = [requests // len(clients) + (index < requests % len(clients)) for index in range(len(clients))]
        async with asyncio.TaskGroup() as group:
            for client, share in zip(clients, shares, strict=True):
                group.create_task(client.play(http, share))
    await gateway.stop()
    promises = ("leaks", "5xx not injected", "no envelope", "gateway failures", "crashes", "broken connections")
    seconds = time.perf_counter() - started
    return {
        "bad": sum(tally[name] for name in promises),
        **{name: tally[name] for name in (*promises, *sorted(tally))},
        "injected faults": sampler.injected,
        "requests/s": requests / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a gateway and a seed of its own")
    parser.add_argument("--sockets", type=float, default=0.1, help="share of the requests that come through sockets")
    parser.add_argument("--json", metavar="FILE", help="write the table there as well")
    arguments = parser.parse_args()
    shares = [arguments.requests // arguments.workers] * arguments.workers
    shares[0] += arguments.requests - sum(shares)
    began = time.perf_counter()
    with ProcessPoolExecutor(arguments.workers) as pool:
        seeds = range(arguments.seed, arguments.seed + arguments.workers)
        tables = list(pool.map(fuzz_alone, shares, seeds, [arguments.sockets] * arguments.workers))
    table = {name: sum(part.get(name, 0) for part in tables) for name in {name: 0 for part in tables for name in part}}
    table["requests/s"] = arguments.requests / (time.perf_counter() - began)
    for name, count in table.items():
        print(f"{name:<40} {count:>12.0f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(table | {"seed": arguments.seed}, file, indent=1)
    return 1 if table["bad"] else 0


def fuzz_alone(requests: int, seed: int, sockets: float) -> dict[str, float]:
    """Fuzz in this process."""
    return asyncio.run(fuzz(requests=requests, seed=seed, sockets=sockets))


if __name__ == "__main__":
    raise SystemExit(main())
