# pyright: basic
"""What is left of a ledger whose process was killed."""

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from ledger_kit import RUN, read

from etude.store.ledger import LedgerWriter
from etude.store.opening import open_store
from etude.telemetry.events import Admitted

KILLS = 25
NURSERY = Path(__file__).with_name("ledger_nursery.py")


@contextmanager
def nursery():
    """A process that has imported everything and forks a writer for each line of `<directory> <seed>`."""
    command = [sys.executable, str(NURSERY), RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        yield process
        process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]


def killed(process, directory, seed):
    """Let a writer write, kill it anywhere, and return its folder and the last ticket that it knew to be flushed."""
    pauses = random.Random(seed)
    process.stdin.write(f"{directory} {seed}\n".encode())
    pid, writer = process.stdout.readline().split()
    flushed = -1
    for _ in range(pauses.randrange(20)):
        flushed = int(process.stdout.readline())
    os.kill(int(pid), signal.SIGKILL)
    while (line := process.stdout.readline()) != b"dead\n":
        flushed = int(line)
    return writer.decode(), flushed


async def test_every_flushed_fact_outlives_a_kill_and_nothing_torn_passes(tmp_path):
    store = open_store(str(tmp_path))
    left = {}
    with nursery() as process:
        for seed in range(KILLS):
            writer, flushed = killed(process, tmp_path, seed)
            facts, reader = await read(store, writer)
            assert [fact.ticket for fact in facts[1:]] == list(range(len(facts) - 1))
            assert len(facts) - 1 > flushed
            assert not reader.closed
            left[writer] = facts, reader.torn_bytes
    async with await LedgerWriter.open(store, tmp_path, "controller", RUN) as ledger:
        ledger.record(Admitted(ticket=0, task="", version=0))
    assert len({*left, ledger.writer}) == KILLS + 1
    for writer, expected in left.items():
        facts, reader = await read(store, writer)
        assert (facts, reader.torn_bytes) == expected
