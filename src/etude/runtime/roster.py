"""The samplers in service: who comes up joins once it is proven, who goes is forgotten, who fails is quarantined."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from time import monotonic
from typing import Any

from etude.errors import EtudeError, SamplerError
from etude.interfaces import Ledger
from etude.runtime.inspection import Expected, Observation, defect, slow, suspicion
from etude.runtime.supervisor import Supervisor
from etude.sampling.client import SamplerClient
from etude.sampling.router import SamplerRouter
from etude.sampling.seats import Terms
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import Quarantined
from etude.telemetry.waits import waiting
from etude.types import SamplerStatus
from etude.weight_types import Head

_PROVEN_WITHIN_S = 300.0

Proof = Callable[[str, SamplerClient], Awaitable[None]]
"""Raises `SamplerError` when the sampler of that name must not serve."""


class Roster:
    """Keeps a router's replicas in step with the samplers of a supervisor, in tasks that it owns.

    An async context manager. What goes wrong with the roster itself, such as a ledger that the disk does not take, is
    raised by `watch`.
    """

    name = "roster"

    def __init__(
        self,
        router: SamplerRouter,
        supervisor: Supervisor,
        *,
        expected: Mapping[str, Expected],
        read_head: Callable[[], Awaitable[Head | None]],
        look_s: float,
        patience_s: float,
        ledger: Ledger = NO_LEDGER,
        note: Callable[[str], None] = lambda _: None,
        proof: Proof | None = None,
        terms: Mapping[str, Terms] | None = None,
    ) -> None:
        """Look at the `expected` samplers every `look_s` seconds; `patience_s` is what `inspection` grants them.

        `proof` is asked before a sampler that came up may serve; `terms` are those on which samplers are to be had.
        """
        self._router = router
        self._supervisor = supervisor
        self._expected = expected
        self._read_head = read_head
        self._look_s = look_s
        self._patience_s = patience_s
        self._ledger = ledger
        self._note = note
        self._proof = proof
        self._terms = terms or {}
        self._clients: dict[str, SamplerClient] = {}
        """Of samplers that are up."""
        self._seen: dict[str, Observation] = {}
        """Of those of them that serve, or did."""
        self._suspended: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Roster":
        self._supervisor.listen(self._came_up, self._went_down)
        self._own(self._look(), "look at the samplers")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if not self._failure.done():
            self._failure.cancel()
        for client in self._clients.values():
            await client.close()

    @property
    def is_complete(self) -> bool:
        """Whether every sampler serves."""
        return self._seen.keys() == self._expected.keys() and not self._suspended

    async def complete(self, *, owner: str, deadline_s: float) -> None:
        """Return once every sampler serves; raise `RunError` when that takes longer."""
        async with waiting("all samplers", owner=owner, on="supervisor", deadline_s=deadline_s):
            while self._seen.keys() != self._expected.keys():
                await self._changed.wait()

    async def watch(self) -> None:
        """Wait until the roster itself fails, and raise why."""
        await asyncio.shield(self._failure)

    def quarantine(self, name: str, reason: str) -> None:
        """Put a sampler out of service for good: it is ended, and joins again once a new life of it is proven."""
        client = self._clients.get(name)
        if client is None:
            return
        self._suspend(name, client, reason)
        self._supervisor.restart(name, f"was quarantined: it {reason}")

    def serving(self) -> dict[str, SamplerClient]:
        """Return the ways to the samplers in service, by name."""
        well = self._seen.keys() - self._suspended
        return {name: client for name, client in self._clients.items() if name in well}

    def client(self, name: str) -> SamplerClient | None:
        """Return the way to one sampler; None while it is down."""
        return self._clients.get(name)

    def _came_up(self, name: str, url: str) -> None:
        if name not in self._expected:
            return
        client = self._clients[name] = SamplerClient(url)
        self._own(self._welcome(name, client), f"welcome {name}")

    def _went_down(self, name: str, reason: str) -> None:
        del reason
        client = self._clients.pop(name, None)
        self._suspended.discard(name)
        if client is not None:
            self._router.discard(client)
            self._own(client.close(), f"part from {name}")
        if self._seen.pop(name, None) is not None:
            self._notify()

    async def _welcome(self, name: str, client: SamplerClient) -> None:
        """Let a sampler serve once it has proven itself."""
        try:
            if self._proof is not None:
                async with waiting(
                    "the proof", owner="roster", on=name, deadline_s=_PROVEN_WITHIN_S, error=SamplerError
                ):
                    await self._proof(name, client)
        except SamplerError as error:
            if self._clients.get(name) is client:
                self.quarantine(name, f"did not prove itself: {error}")
            return
        if self._clients.get(name) is client:
            now = monotonic()
            self._seen[name] = Observation(now=now, answered_at=now, followed_at=now, stepped_at=now, well_at=now)
            self._router.add(client, self._terms.get(name))
            self._notify()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            names = list(self._seen)
            statuses = await asyncio.gather(*map(self._ask, names))
            # Read after the samplers were asked: none of them can be ahead of it.
            head = await self._head()
            too_slow = slow({name: self._router.token_s(client) for name, client in self._clients.items()})
            for name, status in zip(names, statuses, strict=True):
                if name in self._seen:
                    self._judge(name, status, head, too_slow.get(name, ""))

    async def _ask(self, name: str) -> SamplerStatus | None:
        client = self._clients.get(name)
        if client is None:
            return None
        try:
            [status] = await client.status()
        except SamplerError:
            return None
        return status

    async def _head(self) -> Head | None:
        """Return the head; None when it cannot be read now, so that nobody is blamed for not being there."""
        try:
            return await self._read_head()
        except EtudeError:
            return None

    def _judge(self, name: str, status: SamplerStatus | None, head: Head | None, too_slow: str) -> None:
        seen, client = self._seen[name], self._clients[name]
        seen.note(status, head, monotonic())
        if status is not None:
            self._router.note(client, status)
        found = defect(seen, self._expected[name], head, patience_s=self._patience_s) or too_slow
        if found:
            self.quarantine(name, found)
            return
        doubt = suspicion(seen, patience_s=self._patience_s)
        if doubt and name not in self._suspended:
            self._suspend(name, client, doubt)
        elif not doubt and name in self._suspended:
            self._suspended.discard(name)
            self._router.release(client)
            self._note(f"sampler {name} serves again")

    def _suspend(self, name: str, client: SamplerClient, reason: str) -> None:
        self._suspended.add(name)
        self._router.quarantine(client, f"{name} {reason}")
        self._ledger.record(Quarantined(sampler=name, reason=reason))
        self._note(f"sampler {name} is quarantined: it {reason}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._retire)

    def _retire(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._failure.done():
            return
        self._failure.set_exception(error)
        self._failure.exception()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
