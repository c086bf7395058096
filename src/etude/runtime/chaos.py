"""A recipe under attack: its processes are killed one after the other while it runs, and it must not matter.

The run is a child of this process, and its services are found below it in /proc. Who is killed is drawn from a seed;
the moment is not repeatable, for it depends on the machine.
"""

import asyncio
import errno
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec

from etude.environments.census import living
from etude.environments.commands import children_of
from etude.errors import HostError, RunError
from etude.runtime.services import is_alive

KINDS = ("controller", "trainer", "sampler", "launcher", "sandbox")
"""What is killed: `controller` hosts gateway, worker and supervisor too; `launcher` starts all `sandbox` processes."""

_LOOK_S = 0.05
_RECOVERY_S = 180.0
_END_S = 3600.0
_MAX_STARTS_MORE = 5
"""Times that the command may end by itself, beyond the kills of the controller, before chaos gives up."""


class ChaosPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to a run."""

    kills: int
    seed: int
    pause_s: float = 2.0
    """Mean time between a recovery and the next kill."""
    full_disks: int = 0
    """Times that the run's file system is filled for a while; it must be one that nobody else uses."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to a run, and how it took it."""

    kills: dict[str, int]
    full_disks: int
    starts: int
    """Times that the command was started."""
    seconds: float
    recovery_s: dict[str, float]
    """Longest time, by kind, until the processes of that kind were all back."""


class Chaos:
    """Attacks one run until it is finished."""

    def __init__(self, command: Sequence[str], plan: ChaosPlan, *, place: Path, log: Path) -> None:
        """Attack `command`, which resumes its run when it is started again.

        Args:
            command: Program and arguments.
            plan: What to do.
            place: Directory on the file system that `full_disks` fills.
            log: File that the command's output is added to.
        """
        self._command = tuple(command)
        self._plan = plan
        self._place = place
        self._log = log
        self._random = random.Random(plan.seed)
        self._kills: Counter[str] = Counter()
        self._filled = 0
        self._starts = 0
        self._recovery_s: dict[str, float] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> ChaosReport:
        """Start the command, again whenever it ends before its time, and kill until the plan is carried out.

        Raises:
            RunError: The command fails again and again, ends before all kills are done, or does not recover.
        """
        started = perf_counter()
        attacks = self._attacks()
        await self._start()
        try:
            while attacks:
                kind = attacks[0]
                if not await self._recovered(kind):
                    break
                await asyncio.sleep(self._random.expovariate(1.0 / self._plan.pause_s))
                if await self._attack(kind):
                    attacks.pop(0)
            await self._until_finished()
        finally:
            await self._stop()
        if attacks:
            msg = f"the run was finished {len(attacks)} attacks too early: take a longer recipe or a shorter pause"
            raise RunError(f"{msg} (--pause)")
        return ChaosReport(
            kills=dict(self._kills),
            full_disks=self._filled,
            starts=self._starts,
            seconds=perf_counter() - started,
            recovery_s=self._recovery_s,
        )

    def _attacks(self) -> list[str]:
        """Return every kind equally often, in an order drawn from the seed."""
        attacks = [KINDS[number % len(KINDS)] for number in range(self._plan.kills)]
        attacks += ["full_disk"] * self._plan.full_disks
        self._random.shuffle(attacks)
        return attacks

    async def _start(self) -> None:
        self._starts += 1
        allowed = self._kills["controller"] + 2 * self._filled + _MAX_STARTS_MORE
        if self._starts > allowed + 1:
            msg = f"the command ended {self._starts - 1} times, more than it was attacked; read the end of {self._log}"
            raise RunError(msg)
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )

    async def _recovered(self, kind: str) -> bool:
        """Wait until there is a victim of this kind; False once the run is finished. Start the run anew if it ended."""
        began = perf_counter()
        while perf_counter() - began < _RECOVERY_S:
            if await self._ended():
                return False
            if self._victims(kind):
                waited = perf_counter() - began
                self._recovery_s[kind] = max(waited, self._recovery_s.get(kind, 0.0))
                return True
            await asyncio.sleep(_LOOK_S)
        msg = f"no {kind} to attack came up within {_RECOVERY_S:.0f} s; read the end of {self._log}"
        raise RunError(msg)

    async def _ended(self) -> bool:
        """Whether the run is finished; one that ended in another way is started again."""
        process = self._process
        assert process is not None
        if process.returncode is None:
            return False
        if process.returncode == 0:
            return True
        await self._start()
        return False

    def _victims(self, kind: str) -> list[int]:
        """Return the running processes of a kind; none before all services are up.

        Of a sandbox that is its first process: a process inside of it that somebody kills looks, to anyone who watches,
        like one that the agent's own commands killed.
        """
        assert self._process is not None
        owner = self._process.pid
        services = {pid: _command(pid) for pid in children_of(owner) if is_alive(pid)}
        mine = [population for population in living() if population.owner == owner]
        by_kind = {
            "trainer": [pid for pid, words in services.items() if b"serve-trainer" in words],
            "sampler": [pid for pid, words in services.items() if b"serve-sampler" in words],
            "launcher": [population.launcher for population in mine if population.launcher],
            "sandbox": [pid for population in mine for pid in population.sandboxes],
        }
        if not (by_kind["trainer"] and by_kind["sampler"] and by_kind["sandbox"]):
            return []
        return by_kind.get(kind, [owner])

    async def _attack(self, kind: str) -> bool:
        """Carry out one attack; False when the victim was gone."""
        victims = self._victims(kind)
        if not victims:
            return False
        if kind == "full_disk":
            await self._fill_disk()
            return True
        victim = self._random.choice(sorted(victims))
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self._kills[kind] += 1
        self._say(f"killed {kind} {victim}")
        if kind == "controller":
            assert self._process is not None
            await self._process.wait()
        return True

    async def _fill_disk(self) -> None:
        """Take all the space there is, for a few seconds."""
        ballast = self._place / "ballast"
        self._say("filled the disk")
        try:
            await asyncio.to_thread(_fill, ballast)
            await asyncio.sleep(self._random.uniform(1.0, 4.0))
        finally:
            ballast.unlink(missing_ok=True)
        self._filled += 1

    async def _until_finished(self) -> None:
        try:
            async with asyncio.timeout(_END_S):
                while not await self._ended():
                    assert self._process is not None
                    await self._process.wait()
        except TimeoutError as error:
            msg = f"the run is not finished {_END_S:.0f} s after the last attack; read the end of {self._log}"
            raise RunError(msg) from error

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def _say(self, what: str) -> None:
        sys.stderr.write(f"chaos: {what}\n")
        sys.stderr.flush()


def _command(pid: int) -> list[bytes]:
    """Return the command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _fill(ballast: Path) -> None:
    """Write until the disk is full."""
    block = bytes(1 << 20)
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(block)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise HostError(f"cannot fill the disk at {ballast}: {error.strerror}") from error
                if len(block) == 1:
                    return
                block = bytes(len(block) // 2)
