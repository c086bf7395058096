"""Whether a hundred hostile clients slow a hundred honest ones.

    python benchmarks/hostile_gateway.py [--seconds S] [--rounds N] [--rate R] [--json FILE]

Honest sessions call twice a second, each in its turn of a conversation, against an engine that takes 100 ms. For
`--seconds` they are alone, then a hundred hostile clients join, then they are alone again, `--rounds` times. Each
hostile client does one thing, `--rate` times a second, from a process of its own at the lowest priority: heads and
bodies a byte at a time, bodies of 1 GiB, deep and wide JSON, wrong charsets, floods of headers, of unknown keys, of
requests behind each other, connections half closed or never read from. A third of them have keys of sessions of their
own. Told are the honest calls per second and their latencies, and the ratios.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from gateway_parts import Part, run_role, say, until_told

HONEST, HOSTILE = 100, 100
DELAY_S, EVERY_S = 0.1, 0.5
PARTS = str(Path(__file__).with_name("gateway_parts.py"))
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def head(path: str, key: str, *lines: str, length: int | None = None) -> bytes:
    """Return the head of a request."""
    size = () if length is None else (f"Content-Length: {length}",)
    told = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines, *size)
    return ("\r\n".join(told) + "\r\n\r\n").encode("latin-1")


def body(path: str, key: str, data: bytes, *lines: str) -> list[bytes]:
    return [head(path, key, *lines, length=len(data)) + data]


def deep(path: str, key: str, dice: random.Random) -> list[bytes]:
    field = "messages" if "responses" not in path else "input"
    nested = b'{"' + field.encode() + b'":' + dice.choice((b"[", b'{"a":')) * dice.choice((500, 20_000, 400_000))
    return body(path, key, nested)


def wide(path: str, key: str, dice: random.Random) -> list[bytes]:
    count = 400_000
    keys = (
        b",".join(b'"%x":0' % number for number in range(count))
        if dice.random() < 0.5
        else b'"a":[' + b"0," * count + b"0]"
    )
    parameters = b'{"messages":[],"input":[],"tools":[{"type":"function","function":{"name":"f","parameters":{%s}}}]}'
    return body(path, key, parameters % keys)


def charset(path: str, key: str, dice: random.Random) -> list[bytes]:
    text = json.dumps({"messages": [{"role": "user", "content": "ü" * 50_000}]}, ensure_ascii=False)
    return body(
        path, key, text.encode(dice.choice(("utf-16", "utf-32", "latin-1"))), "Content-Type: text/plain; charset=utf-7"
    )


def giant(path: str, key: str, dice: random.Random) -> list[bytes]:
    del dice
    return [head(path, key, length=1 << 30), *[b"x" * (1 << 20)] * 1024]


def slow_head(path: str, key: str, dice: random.Random) -> list[bytes]:
    del dice
    return [bytes([byte]) for byte in head(path, key, "X: " + "y" * 100)]


def slow_body(path: str, key: str, dice: random.Random) -> list[bytes]:
    del dice
    return [head(path, key, length=1000), *[b"x"] * 1000]


def headers(path: str, key: str, dice: random.Random) -> list[bytes]:
    return [head(path, key, *[f"X-{dice.random()}: {'y' * dice.choice((1, 9000))}" for _ in range(1000)])]


def pipeline(path: str, key: str, dice: random.Random) -> list[bytes]:
    del dice
    return [head(path, key, length=2) + b"{}"] * 1000


def unknown(path: str, key: str, dice: random.Random) -> list[bytes]:
    del key
    return body(path, f"sk-etude-{dice.random()}", b"{}" * 10_000)


def nonsense(path: str, key: str, dice: random.Random) -> list[bytes]:
    del path, key
    return [dice.randbytes(1000) + b"\r\n\r\n"]


HABITS = (deep, wide, charset, giant, slow_head, slow_body, headers, pipeline, unknown, nonsense)


async def hostile(*, url: str, keys: list[str], rate: float) -> None:
    """Be all hostile clients, until told to stop."""
    host, port = url.removeprefix("http://").split(":")
    tally: Counter[str] = Counter()
    say(clients=HOSTILE)

    async def one(number: int) -> None:
        habit, dice = HABITS[number % len(HABITS)], random.Random(number)
        key = keys[number] if number % 3 == 0 else "sk-etude-nobody"
        await asyncio.sleep(number / HOSTILE / rate)
        while True:
            slow = habit in (slow_head, slow_body)
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                tally[habit.__name__] += 1
                try:
                    async with asyncio.timeout(20.0 if slow else 3.0):
                        for piece in habit(dice.choice(PATHS), key, dice):
                            writer.write(piece)
                            await writer.drain()
                            await asyncio.sleep(0.2 if slow else 0.0)
                        if dice.random() < 0.3:
                            writer.write_eof()
                        if dice.random() < 0.7:
                            await reader.read(1 << 16)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(1 / rate)

    tasks = [asyncio.create_task(one(number)) for number in range(HOSTILE)]
    await until_told()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    say(**tally)


async def phase(gateway: Part, seconds: float, keys: list[str], bad_keys: list[str], rate: float) -> dict[str, Any]:
    """Let the honest ones work, beside hostile ones if `rate` is above 0."""
    url = gateway.ready["url"]
    attacks: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        others = Part("hostile", script=__file__, nice=19, url=url, keys=bad_keys, rate=rate)
        if rate:
            await stack.enter_async_context(others)
            # Until all of them are at it.
            await asyncio.sleep(1 / rate)
        before = gateway.cpu_s()
        honest = Part("harnesses", script=PARTS, url=url, keys=keys, every_s=EVERY_S, seconds=seconds)
        loaded = await (await stack.enter_async_context(honest)).result()
        if rate:
            attacks = await others.result()
    cuts = statistics.quantiles(loaded["took"], n=100)
    return {
        "hostile": bool(rate),
        "calls_per_s": loaded["calls"] / loaded["seconds"],
        "p50_ms": cuts[49] * 1e3,
        "p99_ms": cuts[98] * 1e3,
        "failed": loaded["failed"],
        "cpu_share": (gateway.cpu_s() - before) / loaded["seconds"],
        "attacks": sum(attacks.values()),
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds = 2 * arguments.rounds + 1
    sessions = HONEST * (rounds + 1) + HOSTILE
    phases: list[dict[str, Any]] = []
    async with (
        Part("engine", script=PARTS, delay_s=DELAY_S) as engine,
        Part("gateway", script=PARTS, sampler=engine.ready["url"], sessions=sessions) as gateway,
    ):
        keys = gateway.ready["keys"]
        bad, honest = keys[:HOSTILE], keys[HOSTILE:]
        for number in range(rounds + 1):
            own = honest[number * HONEST : (number + 1) * HONEST]
            # Each phase has fresh sessions, so that all have equally long conversations. The first one warms up.
            rate = arguments.rate if number and number % 2 == 0 else 0.0
            seconds = arguments.seconds if number else 3.0
            found = await phase(gateway, seconds, own, bad, rate)
            if number:
                phases.append(found)
                print("  ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
        peak = (await gateway.result())["peak_mib"]
    alone = [found for found in phases if not found["hostile"]]
    beside = [found for found in phases if found["hostile"]]

    def ratio(name: str) -> float:
        return statistics.mean(found[name] for found in beside) / statistics.mean(found[name] for found in alone)

    return {
        "calls_per_s_ratio": ratio("calls_per_s"),
        "p50_ratio": ratio("p50_ms"),
        "p99_ratio": ratio("p99_ms"),
        "failed": sum(found["failed"] for found in phases),
        "attacks": sum(found["attacks"] for found in phases),
        "peak_mib": peak,
        "phases": phases,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.5, help="attacks per second of each hostile client")
    parser.add_argument("--json", metavar="FILE", help="write the table there as well")
    arguments = parser.parse_args()
    table = asyncio.run(measure(arguments))
    print("  ".join(f"{name} {value:.3f}" for name, value in table.items() if name != "phases"))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table, indent=1))
    return 1 if table["failed"] or table["calls_per_s_ratio"] < 0.9 or table["p50_ratio"] > 1.1 else 0


if __name__ == "__main__":
    import sys

    if len(sys.argv) == 3 and sys.argv[1] == "hostile":
        run_role({"hostile": hostile})
    else:
        raise SystemExit(main())
