"""Several samplers as one: sessions stay where their prefix is, load follows speed, a dead sampler loses nothing."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from etude.errors import (
    ContextOverflowError,
    SamplerBusyError,
    SampleRequestError,
    SamplerError,
    VersionUnavailableError,
)
from etude.sampling.seats import Replica, Seat, Terms
from etude.types import Completion, SampleRequest, SamplerStatus

_SESSIONS_MAX = 10_000
_AFFINITY_WORTH = 2.0
_HEDGE_TIMES = 4.0


class SamplerRouter:
    """Implements `Sampler` over replicas.

    A session stays with the replica that has its prefix, unless another one would be half as expensive; see
    `Seat.cost`. A request that a replica fails, is too busy for, or was drawing when it was put out of service goes to
    another one under the same id: the first one's answer is never read. One that takes far longer than it should is
    asked of a second replica as well, and the first answer counts. When no replica can serve it, such as the only one
    while it is started anew, the router tries again until `patience_s` have passed.
    """

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        *,
        patience_s: float = 60.0,
        hedge_s: float = 20.0,
        region: str = "",
    ) -> None:
        """Route over these replicas; `add` and `discard` change them while requests run.

        Args:
            replicas: To begin with, on equal terms.
            patience_s: How long a request is tried.
            hedge_s: A second replica is asked no sooner.
            region: Where the router is: replicas elsewhere count as more expensive.
        """
        self._seats = [Seat(replica, Terms()) for replica in replicas]
        self._patience_s = patience_s
        self._hedge_s = hedge_s
        self._region = region
        self.hedged = 0
        """Requests that a second replica was asked for as well."""
        self._sessions: OrderedDict[str, Seat] = OrderedDict()
        self._unserved_s: OrderedDict[str, float] = OrderedDict()

    def add(self, replica: Replica, terms: Terms | None = None) -> None:
        """Route to one more replica."""
        self._seats.append(Seat(replica, terms or Terms()))

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

    def note(self, replica: Replica, status: SamplerStatus) -> None:
        """Learn from what a replica says of itself: its version, and whether it wants to leave."""
        for seat in self._seats:
            if seat.replica is replica:
                seat.note_status(status)

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
            tried: set[Seat] = set()
            while (seat := self._choose(request, tried)) is not None:
                tried.add(seat)
                began = clock()
                try:
                    return await self._ask_in_time(seat, request, tried)
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
        for seat, answer in zip(seats, answers, strict=True):
            if not isinstance(answer, BaseException):
                for status in answer:
                    seat.note_status(status)
        return [status for answer in answers if not isinstance(answer, BaseException) for status in answer]

    async def _ask_in_time(self, seat: Seat, request: SampleRequest, tried: set[Seat]) -> Completion:
        """Ask a replica, and a second one when the first takes too long; raise what the last of them raises."""
        asking = {self._begin(seat, request)}
        try:
            done, _ = await asyncio.wait(asking, timeout=self._too_long(seat, request))
            second = None if done else self._choose(request, tried)
            if second is not None:
                tried.add(second)
                self.hedged += 1
                asking.add(self._begin(second, request))
            while True:
                done, pending = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    if not pending or answer.exception() is None:
                        return answer.result()
                asking = pending
        finally:
            # The other one's answer is never read.
            for late in asking:
                late.cancel()
                with suppress(asyncio.CancelledError, SamplerError):
                    await late

    def _too_long(self, seat: Seat, request: SampleRequest) -> float:
        """Return after how many seconds a second replica should be asked."""
        return max(self._hedge_s, _HEDGE_TIMES * seat.token_s * request.params.max_tokens)

    def _begin(self, seat: Seat, request: SampleRequest) -> "asyncio.Task[Completion]":
        # Counted before the task begins: whoever chooses next has to know.
        seat.outstanding += 1
        asking = asyncio.create_task(self._ask(seat, request))
        asking.add_done_callback(lambda _: seat.leave())
        return asking

    async def _ask(self, seat: Seat, request: SampleRequest) -> Completion:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            if seat.failures:
                await seat.replica.status()
            completion = await self._draw(seat, request)
        except (ContextOverflowError, SampleRequestError, SamplerBusyError, VersionUnavailableError):
            raise
        except SamplerError:
            seat.note_failure(clock())
            raise
        seat.note_success(completion, clock() - started)
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

    async def _draw(self, seat: Seat, request: SampleRequest) -> Completion:
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

    def _choose(self, request: SampleRequest, tried: set[Seat]) -> Seat | None:
        """Return the session's own replica unless another one would be half as expensive."""
        now = asyncio.get_running_loop().time()
        own = self._sessions.get(request.session_id)
        free = [
            seat
            for seat in self._seats
            if seat not in tried and not seat.quarantine and (not seat.failures or seat.retry_at <= now)
        ]
        # One that is to leave is better than none.
        staying = [seat for seat in free if not seat.draining or seat is own] or free
        ready = [seat for seat in staying if not seat.is_behind(request)] or staying
        if not ready:
            return None
        fastest = min((seat.token_s for seat in self._seats if seat.token_s), default=1.0)
        costs = {seat: seat.cost(region=self._region, fastest=fastest) for seat in ready}
        best = min(ready, key=costs.__getitem__)
        return own if own in costs and costs[own] <= _AFFINITY_WORTH * costs[best] else best

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
