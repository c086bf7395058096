# pyright: basic
"""Forks writers of ledgers that are there to be killed; see test_ledger_kills.py."""

import asyncio
import os
import random
import sys
from pathlib import Path

from etude.store.ledger import LedgerWriter
from etude.store.local import FileStore
from etude.telemetry.events import Admitted


async def write(directory: Path, seed: int, run_id: str) -> None:
    """Record and flush for ever, in batches of all sizes; say the last ticket after each flush."""
    sizes = random.Random(seed)
    store = FileStore(directory)
    async with await LedgerWriter.open(store, directory, "controller", run_id, segment_bytes=20_000) as ledger:
        say(f"{os.getpid()} {ledger.writer}")
        ticket = 0
        while True:
            for _ in range(sizes.choice((1, 1, 2, 5, 100))):
                task = sizes.randbytes(sizes.choice((5, 20, 20, 3_000))).hex()
                ledger.record(Admitted(ticket=ticket, task=task, version=0))
                ticket += 1
            await (ledger.flush() if sizes.random() < 0.5 else ledger.flush_local())
            say(str(ticket - 1))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(run_id: str) -> None:
    for line in sys.stdin:
        directory, seed = line.split()
        child = os.fork()
        if not child:
            asyncio.run(write(Path(directory), int(seed), run_id))
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main(sys.argv[1])
