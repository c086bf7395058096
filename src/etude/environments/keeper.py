"""Keeps a launcher running: cleans up after one that died, and starts the next one within a budget."""

import asyncio
from collections import deque
from collections.abc import Callable

from etude.environments.launcher import Launcher, Settings, Welcome
from etude.environments.lease import HeldLease
from etude.environments.reaping import remove_remains
from etude.errors import SandboxError
from etude.interfaces import Clock

_RESTARTS = 5
_WINDOW_S = 600.0
_FIRST_PAUSE_S = 0.1


class RestartBudget:
    """How often something may be started again, and how long to wait before it."""

    def __init__(self, clock: Clock) -> None:
        """At most 5 restarts within 10 minutes; the pause doubles from 0.1 s with each that the window holds."""
        self._clock = clock
        self._times: deque[float] = deque()

    async def spend(self) -> bool:
        """Wait until the next restart is due; False when there were too many."""
        now = self._clock.now()
        while self._times and self._times[0] < now - _WINDOW_S:
            self._times.popleft()
        if len(self._times) >= _RESTARTS:
            return False
        self._times.append(now)
        await self._clock.sleep(_FIRST_PAUSE_S * 2 ** (len(self._times) - 1))
        return True


class Keeper:
    """Has a launcher, or says why not."""

    def __init__(
        self,
        settings: Settings,
        lease: HeldLease,
        budget: RestartBudget,
        *,
        on_gone: Callable[[str], None],
        on_death: Callable[[], None],
        on_cleaned: Callable[[], None],
    ) -> None:
        """Prepare to start launchers for the owner of a lease.

        Args:
            settings: What each launcher is told.
            lease: Names the launcher to other processes.
            budget: For launchers after the first.
            on_gone: Told the name of each sandbox that the launcher saw the end of.
            on_death: Called when a launcher dies: its sandboxes are lost.
            on_cleaned: Called once nothing of a dead launcher's sandboxes is left.
        """
        self._settings = settings
        self._lease = lease
        self._budget = budget
        self._on_gone = on_gone
        self._on_death = on_death
        self._on_cleaned = on_cleaned
        self._launcher: Launcher | None = None
        self._welcome: Welcome | None = None
        self._cleaning: asyncio.Task[bool] | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def process_id(self) -> int:
        """Of the launcher; 0 while there is none."""
        return self._launcher.process_id if self._launcher else 0

    @property
    def welcome(self) -> Welcome:
        """What the first launcher said of itself."""
        assert self._welcome is not None
        return self._welcome

    async def launcher(self) -> Launcher:
        """Return the launcher, started anew if the last one died.

        Raises:
            SandboxError: It dies again and again, what it left cannot be removed, or this backend was closed.
        """
        async with self._starting:
            if self._closed:
                msg = "the sandbox backend was closed; no more sandboxes can be made"
                raise SandboxError(msg)
            if self._launcher is None:
                await self._start()
            if self._launcher is None:
                msg = "the sandbox launcher died as soon as it was up; look for what kills processes on this host"
                raise SandboxError(msg)
            return self._launcher

    async def close(self) -> bool:
        """End every sandbox and the launcher; False when something of them cannot be removed."""
        async with self._starting:
            self._closed = True
            if self._launcher is not None:
                await self._launcher.close()
                self._launcher = None
                return await asyncio.to_thread(remove_remains, self._lease.lease)
            return await self._cleaned()

    async def _start(self) -> None:
        if not await self._cleaned():
            groups = ", ".join(self._lease.lease.groups)
            msg = (
                f"what the dead sandbox launcher left cannot be removed; end what runs in {groups} or restart the host"
            )
            raise SandboxError(msg)
        if self._welcome is not None and not await self._budget.spend():
            msg = (
                f"the sandbox launcher died more than {_RESTARTS} times within {_WINDOW_S / 60:.0f} minutes; "
                "look into the kernel's log for what kills it (out of memory?)"
            )
            raise SandboxError(msg)
        launcher, welcome = await Launcher.start(self._settings, on_gone=self._on_gone, on_end=self._died)
        self._launcher = launcher
        self._lease.update(launcher=launcher.process_id)
        if welcome != (self._welcome or welcome):
            await launcher.close()
            self._launcher = None
            msg = (
                f"this host enforces other limits on sandboxes than when the run began: {welcome}, was {self._welcome}"
            )
            raise SandboxError(f"{msg}; restart the run")
        self._welcome = welcome

    def _died(self) -> None:
        dead, self._launcher = self._launcher, None
        self._on_death()
        if dead is not None:
            self._cleaning = asyncio.create_task(self._bury(dead), name="remains of the sandbox launcher")

    async def _bury(self, dead: Launcher) -> bool:
        await dead.close()
        removed = await asyncio.to_thread(remove_remains, self._lease.lease)
        if removed:
            self._on_cleaned()
        return removed

    async def _cleaned(self) -> bool:
        return self._cleaning is None or await asyncio.shield(self._cleaning)
