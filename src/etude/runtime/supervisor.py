"""Starts the processes of a run on this machine, notices when one dies or falls silent, and starts it anew.

A process is up once it has said `ready`. From then on it is asked for its health every `supervision.heartbeat_s`; one
that has not answered for `lease_s` is killed, whether it hangs, is stopped or lost its port. What died is started again
after a pause that doubles, as often as the budget of restarts allows; beyond it, or when the process says that user or
machine are to blame, the run ends with the component, the cause and the last lines that it wrote.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic

import aiohttp
import msgspec

from etude.config import SupervisionSection
from etude.errors import EtudeError, HostError, RunError
from etude.interfaces import Ledger
from etude.runtime.children import TELLING_CODES, Child, exit_text, launch
from etude.runtime.leases import LeaseBook
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import ServiceEnded, ServiceStarted
from etude.telemetry.waits import waiting

_PAUSE_MAX_S = 10.0
_ASKED_AT_LEAST = 2
"""Unanswered looks after which a process may count as mute: one alone can be this machine's own sleep."""
_LINES_QUOTED = 3

OnUp = Callable[[str, str], None]
"""Hears the name and URL of a process that came up."""
OnDown = Callable[[str, str], None]
"""Hears the name of a process that is gone, or is about to be ended, and why."""
ReadEnd = Callable[[str], Awaitable[tuple[int, str]]]
"""Returns how many facts the ledger of a writer holds, and its chain value."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A process to be kept running."""

    name: str
    """Unique in the run: `trainer`, a sampler's id, or `derive-` and a view."""
    kind: str
    """`trainer`, `sampler` or `deriver`."""
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name if self.name == self.kind else f"{self.kind} {self.name}"


class _End(Exception):  # noqa: N818 not an error of this process
    """One life of a process is over."""

    def __init__(self, reason: str, error: RunError, code: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.code = code


class _Service:
    """A program and what became of it so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.url = ""
        self.state = "is not started yet"
        self.was_ready = False
        self.restarts: deque[float] = deque()
        """When it was started again, within the window."""
        self.lives = 0
        self.unwanted: asyncio.Future[str] | None = None
        """Set to the reason for which the present life is to be ended."""


async def _nothing_recorded(_writer: str) -> tuple[int, str]:
    return 0, ""


class Supervisor:
    """Keeps the processes of one run running; an async context manager that ends them all, in bounded time."""

    name = "supervisor"

    def __init__(
        self,
        section: SupervisionSection,
        leases: LeaseBook,
        *,
        ledger: Ledger = NO_LEDGER,
        read_end: ReadEnd = _nothing_recorded,
        note: Callable[[str], None] = lambda _: None,
        ready_s: float = 120.0,
        grace_s: float = 10.0,
    ) -> None:
        """Watch as `section` says.

        Args:
            section: Heartbeat, lease and budget.
            leases: Where the run directory is told of the processes.
            ledger: Hears of starts and ends.
            read_end: What the ledger of a process that ended holds.
            note: Called with a line for people when something happens.
            ready_s: Longest time that a process may take to come up.
            grace_s: How long a process that was asked to end may take.
        """
        self._section = section
        self._leases = leases
        self._ledger = ledger
        self._read_end = read_end
        self._note = note
        self._ready_s = ready_s
        self._grace_s = grace_s
        self._services: dict[str, _Service] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._listeners: list[tuple[OnUp, OnDown]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Supervisor":
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        # Each ends its own process, within the grace and a kill; one that was at it already goes on with it.
        for tasks in (list(self._keepers.values()), self._endings):
            if tasks:
                await asyncio.shield(asyncio.wait(tasks))
        if self._http is not None:
            await self._http.close()
        if not self._failure.done():
            self._failure.cancel()

    def listen(self, on_up: OnUp, on_down: OnDown) -> None:
        """Tell these of every process that comes up or goes, from now on."""
        self._listeners.append((on_up, on_down))

    def start(self, program: Program) -> None:
        """Start a program and keep it running."""
        if program.name in self._services:
            msg = f"{program.label} is supervised already"
            raise ValueError(msg)
        service = self._services[program.name] = _Service(program)
        keeper = asyncio.create_task(self._keep(service), name=f"keep {program.label}")
        keeper.add_done_callback(self._retire)
        self._keepers[program.name] = keeper

    def restart(self, name: str, reason: str) -> None:
        """End a process at once and start it anew, within its budget."""
        unwanted = self._services[name].unwanted
        if unwanted is not None and not unwanted.done():
            unwanted.set_result(reason)

    async def up(self, name: str, *, owner: str, deadline_s: float) -> str:
        """Return the URL of a process as soon as it is up; raise what ends the run when it never will be."""
        service = self._services[name]
        label = service.program.label

        def late(text: str) -> RunError:
            return RunError(f"{text}: it {service.state} (its log is {service.program.log})")

        async with waiting("its start", owner=owner, on=f"the {label}", deadline_s=deadline_s, error=late):
            while not service.url:
                if self._failure.done():
                    await self.watch()
                await self._changed.wait()
        return service.url

    def url(self, name: str) -> str:
        """Return where a process serves now; empty while it is down."""
        return self._services[name].url

    async def watch(self) -> None:
        """Wait until a process is given up, and raise why."""
        await asyncio.shield(self._failure)

    async def _keep(self, service: _Service) -> None:
        """Live one life of a process after the other."""
        while True:
            try:
                await self._live(service)
            except _End as end:
                pause_s = self._pause(service, end)
                label = service.program.label
                self._note(f"the {label} {end.reason}; it is started again in {pause_s:g} s")
                self._now(service, f"{end.reason} and waits to be started again")
                service.lives += 1
                await asyncio.sleep(pause_s)

    async def _live(self, service: _Service) -> None:
        """Start the process and stay with it; raise `_End` when it is over, for whatever reason but a cancellation."""
        program = service.program
        child = await self._launch(program)
        self._leases.began(program.name, program.kind, child, restarts=service.lives)
        self._now(service, "comes up")
        reason = "failed to be started"
        try:
            await self._until_ready(child)
            self._came_up(service, child)
            await self._until_over(service, child)
        except _End as end:
            reason = end.reason
            raise
        except asyncio.CancelledError:
            reason = ""
            raise
        finally:
            service.unwanted = None
            if service.url:
                self._went_down(service, reason)
            ending = asyncio.create_task(self._put_away(service, child, reason), name=f"end {program.label}")
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await asyncio.shield(ending)

    async def _launch(self, program: Program) -> Child:
        try:
            return await launch(program.label, program.command, log=program.log, environment=program.environment)
        except OSError as error:
            what = f"could not be started ({error.strerror})"
            failed = RunError(f"the {program.label} {what}: {error.filename or program.command[0]}")
            failed.exit_code = HostError.exit_code
            raise _End(what, failed, None) from error

    async def _until_ready(self, child: Child) -> None:
        try:
            await child.wait_until_ready(self._ready_s)
        except RunError as error:
            code = child.exit_code
            what = f"did not come up within {self._ready_s:g} s" if code is None else f"ended with {exit_text(code)}"
            raise _End(what, error, code) from error

    def _came_up(self, service: _Service, child: Child) -> None:
        program = service.program
        service.was_ready = True
        service.url = child.url
        service.unwanted = asyncio.get_running_loop().create_future()
        self._leases.came_up(program.name)
        self._ledger.record(ServiceStarted(service=program.name, writer=child.writer, pid=child.process_id))
        self._now(service, "is up")
        for on_up, _ in self._listeners:
            on_up(program.name, child.url)

    async def _until_over(self, service: _Service, child: Child) -> None:
        """Raise `_End` when the process ends by itself, falls silent, or is no longer wanted."""
        assert service.unwanted is not None
        over = asyncio.ensure_future(child.ended())
        mute = asyncio.ensure_future(self._until_mute(child))
        try:
            await asyncio.wait({over, mute, service.unwanted}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                code = over.result()
                what = f"ended with {exit_text(code)}"
                raise _End(what, child.failure(what, code, lines=_LINES_QUOTED), code)
            what = service.unwanted.result() if service.unwanted.done() else mute.result()
            raise _End(what, child.failure(what, lines=_LINES_QUOTED), None)
        finally:
            over.cancel()
            mute.cancel()
            await asyncio.wait({over, mute})

    async def _until_mute(self, child: Child) -> str:
        """Return that the process is mute, once it is."""
        heard, unanswered = monotonic(), 0
        while True:
            await asyncio.sleep(self._section.heartbeat_s)
            if await self._answers(child.url):
                heard, unanswered = monotonic(), 0
                continue
            unanswered += 1
            if unanswered >= _ASKED_AT_LEAST and monotonic() - heard > self._section.lease_s:
                return f"has not answered for {self._section.lease_s:g} s"

    async def _answers(self, url: str) -> bool:
        """Whether a process says that it is well."""
        assert self._http is not None
        try:
            async with (
                asyncio.timeout(self._section.lease_s / _ASKED_AT_LEAST),
                self._http.get(f"{url}/health", allow_redirects=False) as answer,
            ):
                return answer.ok
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _went_down(self, service: _Service, reason: str) -> None:
        service.url = ""
        for _, on_down in self._listeners:
            on_down(service.program.name, reason)

    async def _put_away(self, service: _Service, child: Child, reason: str) -> None:
        """Make sure that the process is gone, and record what it left."""
        if reason:
            await child.kill()
        else:
            await child.stop(grace_s=self._grace_s)
        self._leases.ended(service.program.name, reason)
        if child.url:
            events, chain = await self._end_of(child.writer)
            self._ledger.record(
                ServiceEnded(
                    service=service.program.name, writer=child.writer, reason=reason, events=events, chain=chain
                )
            )

    async def _end_of(self, writer: str) -> tuple[int, str]:
        if not writer:
            return 0, ""
        try:
            return await self._read_end(writer)
        except EtudeError as error:
            self._note(f"the ledger of {writer} could not be read after its end: {error}")
            return 0, ""

    def _pause(self, service: _Service, end: _End) -> float:
        """Return the seconds until the next start; raise when there is none."""
        if end.code in TELLING_CODES and not service.was_ready:
            raise end.error
        section, restarts, now = self._section, service.restarts, monotonic()
        while restarts and now - restarts[0] > section.restart_window_s:
            restarts.popleft()
        if len(restarts) >= section.restarts:
            msg = f"{end.error}. That was after {len(restarts)} restarts within {section.restart_window_s:g} s"
            error = RunError(f"{msg}; supervision.restarts allows no more")
            error.exit_code = end.error.exit_code
            raise error from end.error
        restarts.append(now)
        return min(section.backoff_s * 2 ** (len(restarts) - 1), max(_PAUSE_MAX_S, section.backoff_s))

    def _now(self, service: _Service, state: str) -> None:
        service.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _retire(self, keeper: asyncio.Task[None]) -> None:
        """Let the first process that is given up end the run."""
        if keeper.cancelled() or self._failure.done():
            return
        error = keeper.exception()
        assert error is not None
        self._failure.set_exception(error)
        self._failure.exception()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
