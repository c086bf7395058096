"""How fast `etude verify` reads a ledger, and in how much memory.

    python benchmarks/verify.py [--megabytes 40 160] [--json FILE]

The ledgers are synthetic: evaluation rollouts of 10 calls each in sandboxes of their own, drawn by two samplers from
one version. Every fact is checked against others; there are no group files, whose reading is not the ledger's. Each
size is audited in a process of its own; megabytes are those of uncompressed lines, seconds those of the processor,
memory is what the audit added at its peak.
"""

import argparse
import asyncio
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from etude.runtime.audit.audit import audit
from etude.store.ledger_format import open_run_id
from etude.store.ledger_segments import SegmentWriter
from etude.store.local import FileStore
from etude.telemetry.events import (
    Applied,
    Closed,
    Drawn,
    Event,
    LineageOpened,
    Opened,
    Published,
    RolloutEnded,
    RolloutStarted,
    SandboxCreated,
    SandboxDestroyed,
    Sealed,
    ServiceEnded,
    ServiceStarted,
)
from etude.weights.publisher import open_publisher

LINEAGE, CALLS, TOKENS, BATCH = "0001-aaaaaaaa", 10, 64, 40
ENCODE = msgspec.json.Encoder().encode


class Writer:
    """A ledger under way, with the bytes of its lines so far."""

    def __init__(self, root: Path, service: str, run_id: str) -> None:
        self.service = service
        self.name = f"{service}-00000000"
        self.segments = SegmentWriter(root, writer=self.name, run_id=run_id)
        self.lines: list[bytes] = []
        self.num_bytes = 0
        self.record(Opened(service=service))

    def record(self, *events: Event) -> None:
        for event in events:
            self.lines.append(ENCODE(event) + b"\n")
            self.num_bytes += len(self.lines[-1])
        if len(self.lines) >= BATCH:
            self.flush()

    def flush(self) -> None:
        self.segments.append(self.lines)
        self.segments.write()
        self.lines = []

    def end(self) -> tuple[int, str]:
        self.record(Closed())
        self.flush()
        self.segments.end()
        self.segments.release()
        return self.segments.events, self.segments.chain


def rollouts(choice: random.Random) -> Iterator[tuple[list[Event], list[Event]]]:
    """Facts of the controller and of a sampler about one rollout after the other."""
    number = 0
    while True:
        rollout = f"eval-v0-task-{number:06d}-0"
        session = f"{rollout}-{choice.randrange(1 << 32):08x}"
        drawn: list[Event] = [
            Drawn(
                t=1.7e9 + number / 10,
                request=f"{session}/{call}",
                prompt=400 + TOKENS * call,
                prompt_digest=f"{choice.getrandbits(64):016x}",
                tokens=TOKENS,
                digest=f"{choice.getrandbits(64):016x}",
                versions=((0, TOKENS),),
                lineage=LINEAGE,
            )
            for call in range(CALLS)
        ]
        told: list[Event] = [
            RolloutStarted(t=1.7e9, rollout=rollout, session=session, task=f"task-{number:06d}", purpose="eval"),
            SandboxCreated(t=1.7e9, sandbox=f"box-{session}"),
            SandboxDestroyed(t=1.7e9, sandbox=f"box-{session}"),
            RolloutEnded(
                t=1.7e9,
                rollout=rollout,
                session=session,
                outcome="scored",
                reward=1.0,
                calls=CALLS,
                drawn=TOKENS * CALLS,
            ),
        ]
        yield told, drawn
        number += 1


async def publish(store: FileStore) -> Published:
    """Publish a version, and return the fact about it."""
    told: list[Published] = []

    async def announce(published: Published) -> None:
        told.append(published)

    publisher = await open_publisher(store, lineage=LINEAGE, announce=announce)
    await publisher.publish(version=0, step=0, tensors={"a.weight": torch.zeros(8, 8)})
    return told[0]


async def write_ledger(root: Path, megabytes: float) -> int:
    """Write a sealed ledger of about this size, and return the bytes of its lines."""
    store = FileStore(root)
    run_id = await open_run_id(store)
    controller, trainer = Writer(root, "controller", run_id), Writer(root, "trainer", run_id)
    samplers = [Writer(root, f"local-{index}", run_id) for index in range(2)]
    services = [trainer, *samplers]
    controller.record(*(ServiceStarted(service=one.service, writer=one.name, pid=1) for one in services))
    published = await publish(store)
    controller.record(LineageOpened(lineage=LINEAGE, version=0))
    trainer.record(published)
    for sampler in samplers:
        sampler.record(Applied(lineage=LINEAGE, version=0, digest=published.digest, held=published.digest, view="fp32"))
    for number, (told, drawn) in enumerate(rollouts(random.Random(0))):
        controller.record(*told[:2])
        samplers[number % 2].record(*drawn)
        controller.record(*told[2:])
        if sum(writer.num_bytes for writer in (controller, *services)) > megabytes * 1e6:
            break
    ends = {one.name: one.end() for one in services}
    for one in services:
        events, chain = ends[one.name]
        controller.record(ServiceEnded(service=one.service, writer=one.name, reason="", events=events, chain=chain))
    head = await store.get("weights/head")
    sealed = {"weights/head": (len(head), hashlib.sha256(head).hexdigest())}
    controller.record(Sealed(files=sealed, writers=ends))
    controller.end()
    return sum(writer.num_bytes for writer in (controller, *services))


def measure(root: Path) -> dict[str, float]:
    """Audit a run in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, wall = time.process_time(), time.perf_counter()
    report = asyncio.run(audit(FileStore(root), run=str(root)))
    assert report.holds, [finding for finding in report.findings if finding.violations]
    return {
        "facts": report.ledger_facts,
        "cpu_s": time.process_time() - started,
        "wall_s": time.perf_counter() - wall,
        "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", nargs="*", type=float, default=[40, 160])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    rows = []
    print(f"{'ledger MB':>10} {'facts':>9} {'cpu s':>7} {'MB/s':>6} {'facts/s':>9} {'peak MB':>8}")
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory() as directory:
            written = asyncio.run(write_ledger(Path(directory), megabytes)) / 1e6
            command = [sys.executable, __file__, "--measure", directory]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        row |= {"ledger_mb": written, "mb_per_s": written / row["cpu_s"]}
        rows.append(row)
        print(
            f"{written:>10.1f} {row['facts']:>9,} {row['cpu_s']:>7.1f} {row['mb_per_s']:>6.1f} "
            f"{row['facts'] / row['cpu_s']:>9,.0f} {row['peak_mb']:>8.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
