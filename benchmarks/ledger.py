"""What a run's ledger costs: bytes per rollout turn, CPU time against the run's own time, and the speed of reading it.

    python benchmarks/ledger.py RUN [--json FILE]

A turn is one model call: one `drawn`. Bytes are those of all segments as they are stored. The cost in CPU time
is measured by doing again what the run did: its facts are recorded and flushed in the same batches, digests are made
over as many tokens as it drew and prompted, and its files are hashed. Reading is what `etude verify` begins with: every
batch is decompressed, checked and decoded into facts.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from etude.store.ledger import LedgerWriter
from etude.store.ledger_format import read_run_id
from etude.store.ledger_reader import read_writer, writers
from etude.store.local import FileStore
from etude.telemetry.digests import of_drawn, of_ids
from etude.telemetry.events import AnyEvent, Closed, Drawn, Opened
from etude.types import Completion, FinishReason, Support, VersionRun

SUPPORT_IDS = 20
"""Ids in the support of a token, roughly what top-p 0.97 and top-k 64 leave."""


@dataclass
class Read:
    """A run's ledger in memory."""

    batches: list[list[AnyEvent]] = field(default_factory=list[list[AnyEvent]])
    stored: int = 0
    text: int = 0
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="What a run's ledger costs.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = asyncio.run(measure(options.run))
    for name, value in measured.items():
        print(f"{name:<42}{value:>16,.4g}" if isinstance(value, float) else f"{name:<42}{value:>16,}")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2))


async def measure(run: Path) -> dict[str, float]:
    read = await read_all(FileStore(run))
    facts = [fact for batch in read.batches for fact in batch]
    drawn = [fact for fact in facts if isinstance(fact, Drawn)]
    wall = run_seconds(run, facts)
    recording = await recording_seconds(read.batches)
    digests = digest_seconds(drawn)
    hashing = hash_seconds(run)
    share = (recording + digests + hashing) / wall
    kinds = Counter(type(fact).__name__ for fact in facts)
    return {
        "facts": len(facts),
        "turns": len(drawn),
        "batches": len(read.batches),
        "stored bytes": read.stored,
        "stored bytes per turn": read.stored / len(drawn),
        "text bytes per turn": read.text / len(drawn),
        "run, seconds": wall,
        "recording and flushing, CPU s": recording,
        "  per fact, us": recording / len(facts) * 1e6,
        "digests of tokens, CPU s": digests,
        "  per turn, us": digests / len(drawn) * 1e6,
        "hashing of files, CPU s": hashing,
        "CPU time of all that / run time, %": 100 * share,
        "reading, MB of text per CPU second": read.text / read.seconds / 1e6,
        **{f"  {name}": count for name, count in kinds.most_common()},
    }


async def read_all(store: FileStore) -> Read:
    """Read every ledger twice: once for the clock, once to keep the facts."""
    read, run_id = Read(), await read_run_id(store)
    for writer in await writers(store):
        started = time.process_time()
        async for _ in read_writer(store, writer, run_id=run_id):
            pass
        read.seconds += time.process_time() - started
        async for batch in read_writer(store, writer, run_id=run_id):
            read.batches.append(batch)
    read.stored = sum(path.stat().st_size for path in store.root.glob("ledger/*/*"))
    read.text = sum(len(msgspec.json.encode(fact)) + 1 for batch in read.batches for fact in batch)
    return read


async def recording_seconds(batches: list[list[AnyEvent]]) -> float:
    """Return CPU seconds, of all threads, for recording these batches and waiting for the disk after each."""
    with tempfile.TemporaryDirectory(prefix="etude-") as scratch:
        store = FileStore(Path(scratch))
        async with await LedgerWriter.open(store, None, "benchmark", "0" * 32) as ledger:
            started = time.process_time()
            for batch in batches:
                for fact in batch:
                    if not isinstance(fact, Opened | Closed):
                        ledger.record(fact)
                await ledger.flush_local()
            return time.process_time() - started


def digest_seconds(drawn: list[Drawn]) -> float:
    """Return CPU seconds for the digests of as many tokens."""
    total = 0.0
    for fact in drawn:
        prompt, count = tuple(range(fact.prompt)), fact.tokens
        support = Support(
            counts=bytes(2 * count), token_ids=bytes(4 * count * SUPPORT_IDS), logprobs=bytes(4 * count * SUPPORT_IDS)
        )
        completion = Completion(
            token_ids=tuple(range(count)),
            sampler_logprobs=bytes(4 * count),
            versions=(VersionRun(0, count),),
            finish_reason=FinishReason.STOP,
            pool="",
            support=support,
        )
        started = time.process_time()
        of_ids(prompt)
        of_drawn(completion)
        total += time.process_time() - started
    return total


def hash_seconds(run: Path) -> float:
    """Return CPU seconds for the digests of the run's groups and rollouts."""
    total = 0.0
    for path in (*run.glob("groups/*/*.parquet"), *run.glob("rollouts/*/*.json")):
        data = path.read_bytes()
        started = time.process_time()
        sha256(data).hexdigest()
        total += time.process_time() - started
    return total


def run_seconds(run: Path, facts: list[AnyEvent]) -> float:
    """Return the seconds of all stages, or, of a run that is under way, those between its first and last fact."""
    summary = run / "summary.json"
    seconds = json.loads(summary.read_text())["seconds"] if summary.exists() else 0.0
    times = [fact.t for fact in facts]
    return seconds or max(times) - min(times)


if __name__ == "__main__":
    main()
