"""Two followers of different views over a store that fails a tenth of the calls, lists late and reorders.

A policy is published, and its fp8 view derived, for 200 versions in three lineages; both chains are followed by readers
that now and then fall behind. Prints what they read against the cheapest plans, and fails unless every digest is right.

    python benchmarks/followers.py [--versions 200] [--parameters 2000000] [--json FILE]
"""

import argparse
import asyncio
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from etude.policy.digest import held_digest, view_digest
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.store.retrying import RetryingStore
from etude.telemetry.clock import ManualClock
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.derived import Deriver, view_keys
from etude.weights.follower import Follower
from etude.weights.leases import LeaseKeeper
from etude.weights.publisher import open_publisher

MOST_ABOVE_PLAN = 1.15
FAULTS = Faults(fail=0.1, lost_reply=0.02, list_delay_s=2.0, max_delay_s=0.2)
VIEW = "fp8"


class CountingStore:
    """Passes every call on, and counts the bytes that reads return."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.num_bytes = 0

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = await self.inner.get(key, max_bytes=max_bytes)
        self.num_bytes += len(data)
        return data

    async def get_if_changed(self, key: str, *, tag: str | None, max_bytes: int | None = None):
        found = await self.inner.get_if_changed(key, tag=tag, max_bytes=max_bytes)
        self.num_bytes += len(found[0]) if found else 0
        return found

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        data = await self.inner.get_range(key, start, length)
        self.num_bytes += len(data)
        return data


class Reader:
    """A follower behind a client of its own, and what it saw."""

    def __init__(self, inner, clock: ManualClock, keys: ChainKeys, seed: int) -> None:
        self.store = CountingStore(FaultyStore(inner, clock=clock, faults=FAULTS, seed=seed))
        client = RetryingStore(self.store, clock=clock, attempts=40, seed=seed)
        self.follower = Follower(client, clock=clock, keys=keys, lease=LeaseKeeper(client, keys=keys), seed=seed)
        self.seen: list[tuple[str, int]] = []
        self.wrong = 0

    async def look(self, digests: dict[tuple[str, int], str], published: dict[tuple[str, int], str]) -> None:
        """Take the newest version, and check it against what was published."""
        staged = await self.follower.poll()
        if staged is None:
            return
        name = (staged.lineage, staged.version)
        self.seen.append(name)
        held = await asyncio.to_thread(held_digest, staged.tensors)
        self.wrong += held != digests[name] or staged.digest != published[name]


def moved(tensors: dict[str, torch.Tensor], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return weights a step of lr 1e-6 later."""
    return {name: tensor + 2.5e-7 * torch.randn(tensor.shape, generator=draw) for name, tensor in tensors.items()}


async def follow(versions: int, parameters: int) -> dict[str, object]:
    """Publish, derive and follow; return what was read."""
    clock, draw, dice = ManualClock(), torch.Generator().manual_seed(0), random.Random(0)
    rows = max(1, parameters // 4096)
    tensors = {f"layers.{n}.mlp.up_proj.weight": torch.randn(rows, 1024, generator=draw) * 0.02 for n in range(4)}
    tensors |= {"norm.weight": torch.ones(1024)}
    with TemporaryDirectory() as folder:
        inner = open_store(folder)
        writer = RetryingStore(FaultyStore(inner, clock=clock, faults=FAULTS, seed=1), clock=clock, attempts=40)
        deriver = Deriver(writer, view=VIEW, clock=clock)
        readers = {"bf16": Reader(inner, clock, WEIGHTS, 2), VIEW: Reader(inner, clock, view_keys(VIEW), 3)}
        digests: dict[str, dict[tuple[str, int], str]] = {name: {} for name in readers}
        published: dict[tuple[str, int], str] = {}
        publisher = await open_publisher(writer, lineage="0000", dtype="bfloat16", difference="exp_ctx")
        for version in range(versions):
            lineage = f"{3 * version // versions:04d}"
            if lineage != publisher.lineage:
                publisher = await open_publisher(writer, lineage=lineage, dtype="bfloat16", difference="exp_ctx")
            tensors = moved(tensors, draw)
            rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
            manifest = await publisher.publish(version=version, step=version, tensors=tensors)
            published[lineage, version] = manifest.digest
            for name in readers:
                digests[name][lineage, version] = view_digest(rounded, name)
            await deriver.poll()
            # Each reader misses a version in four, and now and then many.
            behind = dice.random() < 0.05
            await asyncio.gather(
                *(reader.look(digests[name], published) for name, reader in readers.items()
                  if not behind and dice.random() < 0.75)
            )  # fmt: skip
        for name, reader in readers.items():
            await reader.look(digests[name], published)
    return {name: summary(reader) for name, reader in readers.items()}


def summary(reader: Reader) -> dict[str, object]:
    """Return what a reader saw and read."""
    planned = reader.follower.paths.planned_bytes
    return {
        "versions": len(reader.seen),
        "lineages": len({lineage for lineage, _ in reader.seen}),
        "in_order": reader.seen == sorted(reader.seen),
        "wrong": reader.wrong,
        "planned_mb": planned / 1e6,
        "read_mb": reader.store.num_bytes / 1e6,
        "ratio": reader.store.num_bytes / planned,
    }


def main() -> None:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=2_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = asyncio.run(follow(options.versions, options.parameters))
    for name, row in found.items():
        print(
            f"{name:5} {row['versions']} of {options.versions} versions in {row['lineages']} lineages, "
            f"{row['wrong']} wrong; read {row['read_mb']:.2f} MB of {row['planned_mb']:.2f} MB planned: "
            f"{row['ratio']:.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    assert all(row["in_order"] and not row["wrong"] and row["ratio"] <= MOST_ABOVE_PLAN for row in found.values())


if __name__ == "__main__":
    main()
