"""What publishing costs beside the training: memory, time, and the sizes of manifests and objects.

    python benchmarks/publish.py [--json FILE] [--mib 64,256,1024] [--encoders 1] [--uploads 4]

A model of one embedding and many small tensors in bfloat16 is published into a directory: once whole, then as
differences with about one percent of the weights moved by a step. Memory is the most that was resident beyond what is
held anyway (the copy that is published and the one before), per thread that encodes or uploads. It must not grow with
the model.
"""

import argparse
import asyncio
import gc
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from etude.store.opening import open_store
from etude.weights.manifests import encode_manifest
from etude.weights.publisher import open_publisher
from etude.weights.tensors import FlatTensor

MEBIBYTE = 1 << 20
PAGE = 4096


class Resident:
    """The most memory that this process had resident, looked at every millisecond."""

    def __enter__(self) -> "Resident":
        gc.collect()
        self.before = self.peak = resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, resident())


def resident() -> int:
    """Return the anonymous memory of this process; files that are mapped are the kernel's to drop."""
    size, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(size) - int(shared)) * PAGE


def model(mebibytes: int) -> dict[str, FlatTensor]:
    """Return bfloat16 weights of about this size: half of it one tensor, the rest in tensors of 1 MiB and norms."""
    rng = np.random.default_rng(0)
    rows = mebibytes * MEBIBYTE // 4 // 512
    shapes = {"embed": (rows, 512)}
    for layer in range(mebibytes // 2):
        shapes |= {f"layers.{layer}.w": (1024, 512), f"layers.{layer}.norm": (512,)}
    return {name: bfloat16(rng.standard_normal(shape, np.float32) * 0.02) for name, shape in sorted(shapes.items())}


def bfloat16(values: np.ndarray) -> FlatTensor:
    patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
    return FlatTensor(dtype="BF16", shape=values.shape, data=patterns.reshape(-1).view(np.uint8))


def stepped(tensors: dict[str, FlatTensor], seed: int) -> dict[str, FlatTensor]:
    """Return weights of which one percent moved by one step."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, flat in tensors.items():
        data = flat.data.copy()
        patterns = data.view(np.uint16)
        patterns[rng.integers(0, patterns.size, patterns.size // 100 + 1)] += 1
        found[name] = FlatTensor(dtype=flat.dtype, shape=flat.shape, data=data)
    return found


async def measure(mebibytes: int, encoders: int, uploads: int) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        publisher = await open_publisher(
            open_store(folder), lineage="one", difference="exp_ctx", encoders=encoders, uploads=uploads, skips=(2,)
        )
        tensors = model(mebibytes)
        for version in range(4):
            if version:
                tensors = stepped(tensors, version)
            with Resident() as memory:
                began, cpu = time.perf_counter(), time.process_time()
                manifest = await publisher.publish_snapshot(version=version, step=version, tensors=tensors)
                seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
            rows.append(
                {
                    "what": ("full copy", "difference", "difference and skip", "difference")[version],
                    "mib": mebibytes,
                    "bytes": sum(piece.length for piece in manifest.pieces),
                    "objects": len({piece.object for piece in manifest.pieces}),
                    "manifest_bytes": len(encode_manifest(manifest)[0]),
                    "seconds": seconds,
                    "cpu_seconds": cpu_seconds,
                    "extra_mib_per_thread": (memory.peak - memory.before) / MEBIBYTE / (encoders + uploads),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mib", default="64,256,1024")
    parser.add_argument("--encoders", type=int, default=1)
    parser.add_argument("--uploads", type=int, default=4)
    options = parser.parse_args()
    rows: list[dict[str, float | str]] = []
    print(
        f"{'model':>9}  {'what':22}{'bytes':>12}{'objects':>9}{'manifest':>10}"
        f"{'seconds':>9}{'CPU s':>7}{'MiB/thread':>12}"
    )
    for mebibytes in map(int, options.mib.split(",")):
        for row in asyncio.run(measure(mebibytes, options.encoders, options.uploads)):
            rows.append(row)
            print(
                f"{row['mib']:5} MiB  {row['what']:22}{row['bytes']:12}{row['objects']:9}{row['manifest_bytes']:10}"
                f"{row['seconds']:9.2f}{row['cpu_seconds']:7.2f}{row['extra_mib_per_thread']:12.1f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
