"""What the gateway adds to a model call, and what a session costs in memory.

    python benchmarks/gateway.py [--quick] [--sessions N] [--seconds S] [--every S] [--litellm PYTHON] [--json FILE]

A thousand sessions call every few seconds, each time with all that was said so far, for five minutes: first the fake
engine itself, then the same through the gateway, then through LiteLLM's proxy if PYTHON is that of an environment where
`litellm[proxy]` is installed. Engine, gateway or proxy, and harnesses are processes of their own. The overhead is the
difference of the latencies' quantiles. `light` is 20 calls per second, which the proxy carries, too; `saturated` is
what 64 sessions that never wait get through, the engine answering at once. No token may be lost: what the engine drew,
what the harnesses were told and what the trees hold is compared.
"""

import argparse
import asyncio
import gc
import json
import os
import secrets
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from gateway_parts import DRAWN, SYSTEM, TOKENIZER, USER, Part, completion, spec

from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.types import Completion, SampleRequest

DELAY_S = 0.1


def quantiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


async def load(url: str, keys: list[str], *, every_s: float, seconds: float) -> dict[str, Any]:
    async with Part("harnesses", script=PARTS, url=url, keys=keys, every_s=every_s, seconds=seconds) as part:
        return await part.result()


PARTS = str(Path(__file__).with_name("gateway_parts.py"))


async def direct(arguments: argparse.Namespace, *, sessions: int, every_s: float, delay_s: float) -> dict[str, Any]:
    async with Part("engine", script=PARTS, delay_s=delay_s) as engine:
        return await load(engine.ready["url"], ["x"] * sessions, every_s=every_s, seconds=arguments.seconds)


async def through_gateway(
    arguments: argparse.Namespace, *, sessions: int, every_s: float, delay_s: float
) -> dict[str, Any]:
    async with (
        Part("engine", script=PARTS, delay_s=delay_s) as engine,
        Part("gateway", script=PARTS, sampler=engine.ready["url"], sessions=sessions) as gateway,
    ):
        before = gateway.cpu_s()
        loaded = await load(gateway.ready["url"], gateway.ready["keys"], every_s=every_s, seconds=arguments.seconds)
        used = gateway.cpu_s() - before
        held, drawn = await gateway.result(), (await engine.result())["drawn"]
    lost = max(drawn, held["drawn"], loaded["drawn"]) - min(drawn, held["drawn"], loaded["drawn"])
    unlinked = held["nodes"] - held["linked"] - sessions
    return loaded | {
        "cpu_s": used,
        "lost": lost,
        "unlinked": unlinked,
        **{k: held[k] for k in ("peak_mib", "tokens", "failures")},
    }


async def through_litellm(
    arguments: argparse.Namespace, *, sessions: int, every_s: float, delay_s: float
) -> dict[str, Any]:
    async with (
        Part("engine", script=PARTS, delay_s=delay_s) as engine,
        litellm(arguments, engine.ready["url"]) as (url, key, pid),
    ):
        before = cpu_s(pid)
        loaded = await load(url, [key] * sessions, every_s=every_s, seconds=arguments.seconds)
        return loaded | {"cpu_s": cpu_s(pid) - before}


@asynccontextmanager
async def litellm(arguments: argparse.Namespace, engine: str) -> AsyncGenerator[tuple[str, str, int]]:
    """Start LiteLLM's proxy in front of the engine, with one worker, as the gateway has one process."""
    model = {"model": "openai/m", "api_base": f"{engine}/v1", "api_key": "x"}
    config = {"model_list": [{"model_name": "m", "litellm_params": model}], "litellm_settings": {"telemetry": False}}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(json.dumps(config))
        command = [str(Path(arguments.litellm).parent / "litellm"), "--config", str(path), "--host", "127.0.0.1"]
        key = f"sk-{secrets.token_hex(32)}"
        environment = os.environ | {
            "LITELLM_MASTER_KEY": key,
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, "--port", str(port), "--num_workers", "1", env=environment, stdout=quiet, stderr=quiet
        )
        try:
            await until_answering(f"http://127.0.0.1:{port}/health/liveliness")
            yield f"http://127.0.0.1:{port}", key, process.pid
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def until_answering(url: str) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        while True:
            try:
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and its children."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(path.parent.name) == pid or int(fields[1]) == pid:
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


async def memory(sessions: int) -> dict[str, float]:
    """Grow sessions to 100,000 tokens each in this process; return bytes per session and per 8 bytes of a token."""

    class Sampler:
        async def sample(self, request: SampleRequest) -> Completion:
            del request
            return completion()

        async def status(self) -> list[object]:
            return []

    tracemalloc.start(1)
    renderer = ChatMLRenderer(TOKENIZER, "chatml-compact")
    gateway = Gateway(sampler=Sampler(), renderer=renderer, context_length=1 << 20)  # pyright: ignore
    await gateway.start()
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    tokens, before = 0, 0
    async with aiohttp.ClientSession() as http:
        # The first one warms everything up.
        for number in range(sessions + 1):
            key = await gateway.open(spec(f"{number}"))
            messages: list[dict[str, object]] = [SYSTEM, USER]
            used = 0
            while used < 100_000:
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(url, json={"messages": messages}, headers=headers) as response:
                    body = await response.json()
                used = body["usage"]["total_tokens"]
                content = f"{number} {used} " + "FAILED test_a " * 140
                messages += [body["choices"][0]["message"], {"role": "user", "content": content}]
            if number:
                tokens += used
            else:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    await gateway.stop()
    return {"mib_per_session": grown / sessions / 2**20, "times_8_bytes": grown / tokens / 8}


def row(name: str, loaded: dict[str, Any], base: dict[str, float]) -> dict[str, Any]:
    told = quantiles(loaded["took"])
    told |= {f"overhead_{key}": told[key] - base[key] for key in ("p50_ms", "p99_ms")}
    told |= {"calls": loaded["calls"], "failed": loaded["failed"], "calls_per_s": loaded["calls"] / loaded["seconds"]}
    told["late_p99_ms"] = quantiles(loaded["late"])["p99_ms"]
    if "cpu_s" in loaded:
        told["cpu_ms_per_call"] = loaded["cpu_s"] / loaded["calls"] * 1e3
    told |= {key: loaded[key] for key in ("lost", "unlinked", "failures", "peak_mib", "tokens") if key in loaded}
    return {"name": name, **told}


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    ways = {"direct": direct, "gateway": through_gateway}
    if arguments.litellm:
        ways["litellm"] = through_litellm
    full, short = arguments.seconds, min(arguments.seconds, 30.0)
    loads = (
        ("", full, {"sessions": arguments.sessions, "every_s": arguments.every, "delay_s": DELAY_S}),
        (", light", short, {"sessions": 100, "every_s": 5.0, "delay_s": DELAY_S}),
        (", saturated", short / 2, {"sessions": 64, "every_s": 0.0, "delay_s": 0.0}),
    )
    rows: list[dict[str, Any]] = []
    for suffix, seconds, options in loads:
        base: dict[str, float] = {}
        for name, way in ways.items():
            loaded = await way(argparse.Namespace(**{**vars(arguments), "seconds": seconds}), **options)
            base = base or quantiles(loaded["took"])
            rows.append(row(name + suffix, loaded, base))
            show(rows[-1])
    rows.append({"name": "memory of 100k tokens", **await memory(arguments.grown)})
    show(rows[-1])
    if arguments.litellm:
        rows.append(ratios({row["name"]: row for row in rows}))
        show(rows[-1])
    return rows


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many times as much LiteLLM's proxy adds, or gets through."""

    def ratio(suffix: str, name: str) -> float:
        return rows[f"litellm{suffix}"][name] / rows[f"gateway{suffix}"][name]

    return {
        "name": "litellm / gateway",
        "overhead_p50_light": ratio(", light", "overhead_p50_ms"),
        "overhead_p99_light": ratio(", light", "overhead_p99_ms"),
        "cpu_light": ratio(", light", "cpu_ms_per_call"),
        "overhead_p50": ratio("", "overhead_p50_ms"),
        "calls_per_s_saturated": ratio(", saturated", "calls_per_s"),
    }


def show(row: dict[str, Any]) -> None:
    print(f"{row['name']:<22}", "  ".join(f"{k} {v:.2f}" for k, v in row.items() if k != "name"), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between the calls of a session")
    parser.add_argument("--grown", type=int, default=5, help="sessions whose memory is measured")
    parser.add_argument("--quick", action="store_true", help="100 sessions for 15 seconds")
    parser.add_argument("--litellm", metavar="PYTHON", default="", help="of an environment with litellm[proxy]")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sessions, arguments.seconds, arguments.every, arguments.grown = 100, 15.0, 1.0, 2
    began = time.perf_counter()
    rows = asyncio.run(measure(arguments))
    print(f"{time.perf_counter() - began:.0f} s; {DRAWN} tokens are drawn per call")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    through = next(row for row in rows if row["name"] == "gateway")
    return 1 if through["lost"] or through["unlinked"] or through["failed"] or through["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
