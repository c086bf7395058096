"""What the gateway adds to a model call: HTTP, session tree, rendering, checks.

    python benchmarks/gateway.py [--json FILE]

Each session is a conversation of 12 turns of 64 drawn tokens with a support of 64 ids each. `sessions` of them run at
the same time against a sampler that needs about `sampler_ms` per call and no processor. Overhead is what the client
waited minus what the sampler took; client and gateway share one process, so `cpu_per_call_ms` is that of both.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import struct
import time
from collections.abc import Sequence

import aiohttp

from etude.gateway.doubles import byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.types import (
    Completion,
    Experts,
    FinishReason,
    SampleRequest,
    SamplerStatus,
    SamplingParams,
    Support,
    VersionRun,
)

TURNS, DRAWN, SUPPORT = 12, 64, 64
TOKENIZER = byte_tokenizer()
ANSWER = TOKENIZER.encode("x" * (DRAWN - 1) + "<|im_end|>").ids
SYSTEM = {"role": "system", "content": "Repair the module. " * 20}
USER = {"role": "user", "content": "The tests fail. " * 20}


class IdleSampler:
    """Draws the same answer each time, with dense facts made up beforehand; `took_s` is by request id."""

    def __init__(self, latency_s: float) -> None:
        self.took_s: dict[str, float] = {}
        self._latency_s = latency_s
        self._random = random.Random(0)
        ids = [sorted({token, *range(1000, 1000 + SUPPORT - 1)}) for token in ANSWER]
        flat = [token for row in ids for token in row]
        self._support = Support(
            counts=struct.pack(f"<{DRAWN}H", *[SUPPORT] * DRAWN),
            token_ids=struct.pack(f"<{len(flat)}I", *flat),
            logprobs=struct.pack(f"<{len(flat)}f", *[-math.log(SUPPORT)] * len(flat)),
        )
        self._logprobs = struct.pack(f"<{DRAWN}f", *[-math.log(SUPPORT)] * DRAWN)

    async def sample(self, request: SampleRequest) -> Completion:
        started = time.perf_counter()
        await asyncio.sleep(self._latency_s * self._random.uniform(0.5, 1.5))
        self.took_s[request.request_id] = time.perf_counter() - started
        positions = len(request.prompt_ids) + DRAWN - 1
        return Completion(
            token_ids=tuple(ANSWER),
            sampler_logprobs=self._logprobs,
            versions=(VersionRun(0, DRAWN),),
            finish_reason=FinishReason.STOP,
            pool="idle",
            support=self._support,
            experts=Experts(start=0, num_layers=4, top_k=2, expert_ids=bytes(16 * positions)),
        )

    async def status(self) -> Sequence[SamplerStatus]:
        return []


async def converse(gateway: Gateway, sampler: IdleSampler, client: aiohttp.ClientSession, name: str) -> list[float]:
    params = SamplingParams(max_tokens=DRAWN)
    spec = SessionSpec(
        session_id=name, purpose="train", seed=0, params=params, max_calls=TURNS, max_session_tokens=TURNS * DRAWN
    )
    headers = {"Authorization": f"Bearer {await gateway.open(spec)}"}
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    messages, seconds = [SYSTEM, USER], []
    for turn in range(TURNS):
        started = time.perf_counter()
        async with client.post(url, json={"messages": messages}, headers=headers) as response:
            body = json.loads(await response.read())
        seconds.append(time.perf_counter() - started - sampler.took_s[f"{name}/{turn}"])
        messages = [*messages, body["choices"][0]["message"], {"role": "tool", "content": "FAILED test_a\n" * 8}]
    record = await gateway.close(name)
    assert len(record.nodes) == TURNS
    assert all(node.parent is not None for node in record.nodes[1:])
    return seconds


async def measure(*, sessions: int, rounds: int, latency_s: float) -> dict[str, float]:
    sampler = IdleSampler(latency_s)
    gateway = Gateway(sampler=sampler, renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"), context_length=1 << 20)
    await gateway.start()
    seconds: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for turn in range(rounds):
            names = [f"{turn}-{index}" for index in range(sessions)]
            for part in await asyncio.gather(*[converse(gateway, sampler, client, name) for name in names]):
                seconds += part
    elapsed, used = time.perf_counter() - started, time.process_time() - cpu
    await gateway.stop()
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "sessions": sessions,
        "sampler_ms": latency_s * 1e3,
        "calls": len(seconds),
        "overhead_p50_ms": cuts[49] * 1e3,
        "overhead_p99_ms": cuts[98] * 1e3,
        "cpu_per_call_ms": used / len(seconds) * 1e3,
        "calls_per_s": len(seconds) / elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    loads = ((1, 40, 0.0), (16, 4, 0.1), (64, 2, 0.4))
    rows = [
        asyncio.run(measure(sessions=sessions, rounds=rounds, latency_s=latency_s))
        for sessions, rounds, latency_s in loads
    ]
    print("  ".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:16.2f}" for value in row.values()))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
