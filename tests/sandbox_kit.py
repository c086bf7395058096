# pyright: basic
"""Sandboxes with owners in processes of their own, which may be killed, and what is left of them."""

import asyncio
import secrets
import sys
from pathlib import Path

OWNER = """
import asyncio, sys
from pathlib import Path
from etude.environments.local import LocalBackend
from etude.store.ledger import LedgerWriter
from etude.store.opening import open_store
from etude.types import Task

async def main():
    path, namespaces, nap, run = sys.argv[1:]
    async with await LedgerWriter.open(open_store(run), None, "controller", "run") as ledger:
        backend = await LocalBackend.start(namespaces=namespaces == "True", run=run, ledger=ledger)
        task = Task(task_id="t", path=path, digest="d", instruction="")
        async with backend.create(task) as one:
            print(backend.name, backend.process_id, one.process_id, one.environment_id, flush=True)
            await one.execute(["sh", "-c", f"setsid sleep {nap} & sleep {nap}"], timeout_s=1000)

asyncio.run(main())
"""


def fresh_nap() -> str:
    """Return a number of seconds that nobody else on this host sleeps for."""
    return str(10**6 + secrets.randbelow(10**8))


class Owner:
    """A process with one busy sandbox, in which two processes nap for as many seconds as nobody else's do."""

    def __init__(self, process, line, nap):
        self.process = process
        self.nap = nap
        self.backend, launcher, first, self.sandbox = line.decode().split()
        self.launcher, self.first = int(launcher), int(first)

    async def kill(self):
        self.process.kill()
        await self.process.wait()


async def owner(task, *, run, namespaces=True) -> Owner:
    """Start an owner whose ledger is in the directory `run`, and wait until its sandbox is busy."""
    nap = fresh_nap()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, task.path, str(namespaces), nap, str(run), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    started = Owner(process, await process.stdout.readline(), nap)
    await until(lambda: len(naps(nap)) == 2)
    return started


async def until(condition, seconds=30.0):
    """Wait until something holds that nobody tells."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def naps(seconds: str) -> list[int]:
    """Return the processes on this host that sleep for so many seconds."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_text().split("\0")[:2] == ["sleep", seconds]:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def runs(pid: int) -> bool:
    """Whether a process exists that has not ended; some hosts never bury the ended ones."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
