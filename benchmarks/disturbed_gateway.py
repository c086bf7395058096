"""Retried, duplicated, reordered and cut connections: the trees must be those of undisturbed sessions.

    python benchmarks/disturbed_gateway.py [--sessions N] [--share P] [--json FILE]

A session is two agents at once, one the sub-agent of the other, with a few turns of tool calls each, every call in a
dialect of its own. What is drawn depends on the prompt alone, so that a session has one possible tree. It is played
undisturbed, and again with a share of its calls disturbed: the connection is cut while the model draws and the call is
sent again, the same call is sent twice at once, or the answer is thrown away and asked for again; all marked as the
SDKs mark what they repeat.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress

import aiohttp

from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.types import Completion, SampleRequest, SamplingParams

TOKENIZER = byte_tokenizer()
TURNS, TOGETHER = 4, 16
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
RETRY = {"x-stainless-retry-count": "1"}


class PromptSampler:
    """Draws what the prompt's tokens decide, after a moment."""

    def __init__(self) -> None:
        self.count = 0

    async def sample(self, request: SampleRequest) -> Completion:
        self.count += 1
        dice = random.Random(str(request.prompt_ids))
        await asyncio.sleep(dice.uniform(0.001, 0.01))
        call = f'<tool_call>{{"name": "shell", "arguments": {{"n":  {dice.randrange(1000)}}}}}</tool_call>'
        answer = (
            f"<think>\n{dice.randrange(1000)}\n</think>\n\n{dice.choice(('', 'I look. '))}{call * dice.randrange(3)}"
        )
        return await ScriptedSampler([answer], tokenizer=TOKENIZER).sample(request)

    async def status(self) -> list[object]:
        return []


def body_of(path: str, turns: list[tuple[str, object]], *, stream: bool) -> dict[str, object]:
    """Return a request; turns are texts of the user, answers and texts of tools, oldest first."""
    body: dict[str, object] = {"model": "m", "stream": stream}
    if path == PATHS[0]:
        return body | {"messages": [message for kind, said in turns for message in chat_messages(kind, said)]}
    if path == PATHS[1]:
        return body | {"input": [item for kind, said in turns for item in response_items(kind, said)]}
    return body | {"max_tokens": 9, "messages": [claude_message(kind, said) for kind, said in turns]}


def chat_messages(kind, said):
    if kind == "user":
        return [{"role": "user", "content": said}]
    if kind == "tool":
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in said]
    text, calls = said
    told = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return [{"role": "assistant", "content": text, **({"tool_calls": told} if told else {})}]


def response_items(kind, said):
    if kind == "user":
        return [{"role": "user", "content": said}]
    if kind == "tool":
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in said]
    text, calls = said
    told = [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in calls]
    return [*([{"role": "assistant", "content": text}] if text or not told else []), *told]


def claude_message(kind, said):
    if kind == "user":
        return {"role": "user", "content": said}
    if kind == "tool":
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in said]
        return {"role": "user", "content": blocks}
    text, calls = said
    blocks = [{"type": "text", "text": text}] if text else []
    blocks += [{"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in calls]
    return {"role": "assistant", "content": blocks}


def answer_of(path: str, told: dict) -> tuple[str, list[tuple[str, str, str]]]:
    if path == PATHS[0]:
        message = told["choices"][0]["message"]
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return message["content"] or "", calls
    if path == PATHS[1]:
        texts = [item["content"][0]["text"] for item in told["output"] if item["type"] == "message"]
        calls = [(i["call_id"], i["name"], i["arguments"]) for i in told["output"] if i["type"] == "function_call"]
        return "".join(texts), calls
    texts = [block["text"] for block in told["content"] if block["type"] == "text"]
    calls = [(b["id"], b["name"], json.dumps(b["input"])) for b in told["content"] if b["type"] == "tool_use"]
    return "".join(texts), calls


class Harness:
    """One agent of a session; `share` of its calls are disturbed."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, *, seed: str, share: float, tally) -> None:
        self.http, self.url, self.tally, self.share = http, url, tally, share
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        # Apart, so that both plays of a session choose the same dialects.
        self.dice, self.trouble = random.Random(seed), random.Random(f"trouble {seed}")

    async def run(self, task: str) -> None:
        turns: list[tuple[str, object]] = [("user", task)]
        for _ in range(TURNS):
            path = self.dice.choice(PATHS)
            data = json.dumps(body_of(path, turns, stream=False)).encode()
            text, calls = answer_of(path, json.loads(await self.call(path, data)))
            turns.append(("answer", (text, calls)))
            results = [(call_id, f"result {number}") for number, (call_id, *_) in enumerate(calls)]
            turns.append(("tool", results) if results else ("user", "go on"))

    async def call(self, path: str, data: bytes) -> bytes:
        how = self.trouble.choice(("cut", "twice", "lost")) if self.trouble.random() < self.share else ""
        self.tally[how or "undisturbed"] += 1
        if how == "cut":
            first = asyncio.create_task(self.post(path, data))
            await asyncio.sleep(self.trouble.uniform(0.002, 0.012))
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
        elif how == "twice":
            told = await asyncio.gather(self.post(path, data), self.post(path, data, RETRY))
            self.tally["different answers"] += told[0] != told[1]
            return told[0]
        elif how == "lost":
            await self.post(path, data)
        return await self.post(path, data, RETRY if how else {})

    async def post(self, path: str, data: bytes, headers: dict[str, str] | None = None) -> bytes:
        async with self.http.post(self.url + path, data=data, headers=self.headers | (headers or {})) as response:
            response.raise_for_status()
            return await response.read()


async def play(gateway: Gateway, http: aiohttp.ClientSession, name: str, *, share: float, tally) -> Counter:
    """Return the branches of a session as a bag: for each node, the tokens from its root to its end."""
    session_id = f"{name} at {share}"
    params = SamplingParams(max_tokens=400)
    key = await gateway.open(
        SessionSpec(
            session_id=session_id, purpose="train", seed=0, params=params, max_calls=99, max_session_tokens=1 << 20
        )
    )
    url = f"http://127.0.0.1:{gateway.port}"
    agents = [Harness(http, url, key, seed=f"{name}/{n}", share=share, tally=tally) for n in range(2)]
    await asyncio.gather(*[agent.run(f"task {number} of {name}") for number, agent in enumerate(agents)])
    record = await gateway.close(session_id)
    sequences: list[tuple[int, ...]] = []
    for node in record.nodes:
        before = () if node.parent is None else sequences[node.parent]
        sequences.append((*before, *node.prompt_ids, *node.completion.token_ids))
    return Counter(sequences)


async def compare(*, sessions: int, share: float) -> dict[str, float]:
    sampler, tally = PromptSampler(), Counter[str]()
    gateway = Gateway(sampler=sampler, renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"), context_length=1 << 16)
    await gateway.start()
    started, gate = time.perf_counter(), asyncio.Semaphore(TOGETHER)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(name: str) -> None:
            async with gate:
                calm = await play(gateway, http, name, share=0.0, tally=Counter())
                rough = await play(gateway, http, name, share=share, tally=tally)
                tally["trees that differ"] += calm != rough
                tally["nodes"] += rough.total()

        await asyncio.gather(*[one(f"session {number}") for number in range(sessions)])
    await gateway.stop()
    drawn_twice = sampler.count - 2 * tally["nodes"]
    return {
        "bad": tally["trees that differ"] + tally["different answers"] + abs(drawn_twice),
        "trees that differ": tally["trees that differ"],
        "different answers": tally["different answers"],
        "drawn without a node": drawn_twice,
        "sessions": sessions,
        **{name: tally[name] for name in ("undisturbed", "cut", "twice", "lost", "nodes")},
        "seconds": time.perf_counter() - started,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.1, help="of the calls that are disturbed")
    parser.add_argument("--json", metavar="FILE", help="write the table there as well")
    arguments = parser.parse_args()
    table = asyncio.run(compare(sessions=arguments.sessions, share=arguments.share))
    for name, count in table.items():
        print(f"{name:<24} {count:>10.0f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(table, file, indent=1)
    return 1 if table["bad"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
