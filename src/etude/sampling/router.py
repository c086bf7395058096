"""Several samplers as one: sessions stay where their prefix is, load follows speed, a dead sampler loses nothing."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from etude.errors import (
    ContextOverflowError,
    SamplerBusyError,
    SampleRequestError,
    SamplerError,
    VersionUnavailableError,
)
from etude.types import Completion, SampleRequest, SamplerStatus

_SESSIONS_MAX = 10_000
_SMOOTHING = 0.2
_AFFINITY_WORTH = 2.0
_COOLDOWN_S = 0.5
_COOLDOWN_MAX_S = 10.0


class Replica(Protocol):
    """A sampler as the router sees it; `SamplerClient` is one."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Raise `SamplerError`, or a kind of it, by a deadline."""
        ...

    async def status(self) -> Sequence[SamplerStatus]:
        """Raise `SamplerError` within seconds."""
        ...


@dataclass(slots=True, eq=False)
class _Seat:
    replica: Replica
    outstanding: int = 0
    token_s: float = 0.0
    """Seconds per drawn token, as requests experienced it lately; 0 before the first one."""
    failures: int = 0
    """In a row; above 0 the replica is asked for its health before anything else."""
    retry_at: float = 0.0
    quarantine: str = ""
    """Why it serves nothing; empty when it serves."""
    drawing: set["asyncio.Future[Completion]"] = field(default_factory=set["asyncio.Future[Completion]"])
    """Requests that it was given and has not answered."""

    def abandon(self) -> None:
        """Take back what it is drawing, for another replica to draw."""
        for request in self.drawing:
            request.cancel()


class SamplerRouter:
    """Implements `Sampler` over replicas.

    A request that a replica fails, is too busy for, or was drawing when it was put out of service goes to another one
    under the same id: the first one's answer is never read. When no replica can serve it, such as the only one while it
    is started anew, the router tries again until `patience_s` have passed.
    """

    def __init__(self, replicas: Iterable[Replica] = (), *, patience_s: float = 60.0) -> None:
        """Route over these replicas; `add` and `discard` change them while requests run."""
        self._seats = [_Seat(replica) for replica in replicas]
        self._patience_s = patience_s
        self._sessions: OrderedDict[str, _Seat] = OrderedDict()
        self._unserved_s: OrderedDict[str, float] = OrderedDict()

    def add(self, replica: Replica) -> None:
        """Route to one more replica."""
        self._seats.append(_Seat(replica))

    def discard(self, replica: Replica) -> None:
        """Forget a replica that is gone; what it was drawing goes to another one."""
        for seat in self._seats:
            if seat.replica is replica:
                seat.abandon()
        self._seats = [seat for seat in self._seats if seat.replica is not replica]
        # A session that kept the seat of a dead replica would keep its client too.
        self._sessions = OrderedDict((name, seat) for name, seat in self._sessions.items() if seat in self._seats)

    def quarantine(self, replica: Replica, reason: str) -> None:
        """Put a replica out of service until `release`; what it was drawing goes to another one.

        `status` leaves it out: what it holds counts for nothing.
        """
        for seat in self._seats:
            if seat.replica is replica:
                seat.quarantine = reason
                seat.abandon()

    def release(self, replica: Replica) -> None:
        """Let a replica serve that has proven itself."""
        for seat in self._seats:
            if seat.replica is replica:
                seat.quarantine = ""

    @property
    def quarantined(self) -> tuple[tuple[Replica, str], ...]:
        """Replicas that are out of service, and why."""
        return tuple((seat.replica, seat.quarantine) for seat in self._seats if seat.quarantine)

    def token_s(self, replica: Replica) -> float:
        """Return the seconds that a token of a replica took lately; 0 while nobody knows."""
        return next((seat.token_s for seat in self._seats if seat.replica is replica), 0.0)

    def unserved_s(self, session_id: str) -> float:
        """Return the seconds that requests of a session waited because replicas failed them or none was in service."""
        return self._unserved_s.get(session_id, 0.0)

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the completion from whichever replica drew it.

        Raises:
            ContextOverflowError: See `EngineSampler.sample`.
            SampleRequestError: See `EngineSampler.sample`.
            VersionUnavailableError: No replica holds exactly the version asked for, or reached `min_version` in time.
            SamplerBusyError: Every replica stayed busy.
            SamplerError: Every replica stayed unreachable.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        pause_s = 0.05
        while True:
            refusals: list[SamplerError] = []
            tried: set[_Seat] = set()
            while (seat := self._choose(request.session_id, tried)) is not None:
                tried.add(seat)
                began = clock()
                try:
                    return await self._ask(seat, request)
                except (ContextOverflowError, SampleRequestError):
                    raise
                except SamplerError as error:
                    refusals.append(error)
                    self._note_unserved(request.session_id, clock() - began)
            stale = [error for error in refusals if isinstance(error, VersionUnavailableError)]
            # A replica that is behind catches up with `min_version`; what is past does not come back.
            if stale and len(stale) == len(refusals) and request.min_version is None:
                raise stale[-1]
            if clock() + pause_s > deadline:
                raise self._given_up(request, refusals)
            began = clock()
            try:
                await asyncio.sleep(pause_s)
            finally:
                # Whoever stops waiting here wants to know, too.
                self._note_unserved(request.session_id, clock() - began)
            pause_s = min(2 * pause_s, 2.0)

    async def status(self) -> Sequence[SamplerStatus]:
        """Return the state of every replica in service that answers. Raise `SamplerError` when none does."""
        seats = [seat for seat in self._seats if not seat.quarantine]
        answers = await asyncio.gather(*(seat.replica.status() for seat in seats), return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in failed:
            if not isinstance(error, SamplerError):
                raise error
        if len(failed) == len(answers):
            raise SamplerError(f"none of {len(answers)} samplers answers: {failed[-1] if failed else self._nobody()}")
        return [status for answer in answers if not isinstance(answer, BaseException) for status in answer]

    async def _ask(self, seat: _Seat, request: SampleRequest) -> Completion:
        clock = asyncio.get_running_loop().time
        started = clock()
        seat.outstanding += 1
        try:
            if seat.failures:
                await seat.replica.status()
            completion = await self._draw(seat, request)
        except (ContextOverflowError, SampleRequestError, SamplerBusyError, VersionUnavailableError):
            raise
        except SamplerError:
            seat.failures += 1
            seat.retry_at = clock() + min(_COOLDOWN_S * 2 ** (seat.failures - 1), _COOLDOWN_MAX_S)
            raise
        finally:
            seat.outstanding -= 1
        seat.failures = 0
        token_s = (clock() - started) / max(1, len(completion.token_ids))
        seat.token_s += (_SMOOTHING if seat.token_s else 1.0) * (token_s - seat.token_s)
        self._sessions[request.session_id] = seat
        self._sessions.move_to_end(request.session_id)
        if len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return completion

    def _note_unserved(self, session_id: str, seconds: float) -> None:
        self._unserved_s[session_id] = self._unserved_s.get(session_id, 0.0) + seconds
        self._unserved_s.move_to_end(session_id)
        if len(self._unserved_s) > _SESSIONS_MAX:
            self._unserved_s.popitem(last=False)

    async def _draw(self, seat: _Seat, request: SampleRequest) -> Completion:
        drawing = asyncio.ensure_future(seat.replica.sample(request))
        seat.drawing.add(drawing)
        try:
            return await drawing
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if asker is not None and asker.cancelling():
                raise
            raise SamplerError(f"request {request.request_id} was taken back: its sampler is out of service") from None
        finally:
            seat.drawing.discard(drawing)

    def _choose(self, session_id: str, tried: set[_Seat]) -> _Seat | None:
        """Return the session's own replica unless another one would serve it in half the time."""
        now = asyncio.get_running_loop().time()
        free = [
            seat
            for seat in self._seats
            if seat not in tried and not seat.quarantine and (not seat.failures or seat.retry_at <= now)
        ]
        if not free:
            return None
        best = min(free, key=self._cost)
        own = self._sessions.get(session_id)
        return own if own in free and self._cost(own) <= _AFFINITY_WORTH * self._cost(best) else best

    def _cost(self, seat: _Seat) -> float:
        """Seconds per token that one more request may expect; a replica without history counts as the fastest known."""
        known = [other.token_s for other in self._seats if other.token_s]
        return (seat.outstanding + 1) * (seat.token_s or min(known, default=1.0))

    def _given_up(self, request: SampleRequest, refusals: Sequence[SamplerError]) -> SamplerError:
        last = refusals[-1] if refusals else self._nobody()
        message = f"request {request.request_id}: no sampler served it within {self._patience_s:g} s; last: {last}"
        kinds = {type(error) for error in refusals}
        kind = kinds.pop() if len(kinds) == 1 else SamplerError
        return kind(message)

    def _nobody(self) -> str:
        """Say why there is no replica to ask."""
        reasons = "; ".join(reason for _, reason in self.quarantined)
        return f"all are quarantined: {reasons}" if reasons else "none is up"
