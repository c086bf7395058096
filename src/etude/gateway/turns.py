"""Whose request is worked on next, on an event loop that all sessions share."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time

BURST_S = 0.5
SHARE = 0.1
HEAVY_SHARE = 0.25
_ALONE_S = 1.0


@dataclass(slots=True)
class _Account:
    spent_s: float
    settled_at: float


class Turns:
    """Keeps a session from taking the loop away from the others.

    A session is light while the processor seconds that its requests took, less `SHARE` of the time that passed, are
    within `BURST_S`: its requests are worked on as they come. The requests of all others go one after the other, and
    take `HEAVY_SHARE` of the time together. A session that is alone waits for nobody.
    """

    def __init__(self, *, now: Callable[[], float] = perf_counter, worked: Callable[[], float] = thread_time) -> None:
        """Tell the time by `now`, and by `worked` how much of it this thread was working."""
        self._now = now
        self._worked = worked
        self._heavy: deque[asyncio.Future[None]] = deque()
        self._accounts: dict[str, _Account] = {}
        self._heavy_from = 0.0
        """When the next heavy request may be worked on."""
        self._alarm: asyncio.TimerHandle | None = None
        self._last = ""
        self._others_at = -_ALONE_S
        """When a request was last that of another session than the one before."""

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncGenerator[None]:
        """Wait for the session's turn, and charge it for the work in the block, which must not wait for anything."""
        now = self._now()
        if session_id != self._last:
            self._last, self._others_at = session_id, now
        if self._balance(session_id, now) > BURST_S and now - self._others_at < _ALONE_S:
            await self._heavy_turn()
        began = self._worked()
        try:
            yield
        finally:
            self._charge(session_id, self._worked() - began)

    def forget(self, session_id: str) -> None:
        """Close the account of a session that is over."""
        self._accounts.pop(session_id, None)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._heavy)

    async def _heavy_turn(self) -> None:
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heavy.append(asked)
        self._set_alarm()
        try:
            await asked
        except asyncio.CancelledError:
            # Whoever was given the turn and does not take it leaves it to the next.
            self._set_alarm()
            raise

    def _balance(self, session_id: str, now: float) -> float:
        account = self._accounts.setdefault(session_id, _Account(0.0, now))
        account.spent_s = max(0.0, account.spent_s - SHARE * (now - account.settled_at))
        account.settled_at = now
        return account.spent_s

    def _charge(self, session_id: str, seconds: float) -> None:
        now = self._now()
        account = self._accounts.get(session_id)
        if account is None:
            return
        if self._balance(session_id, now) > BURST_S:
            self._heavy_from = now + seconds * (1 / HEAVY_SHARE - 1)
        account.spent_s += seconds
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._heavy and self._alarm is None:
            pause_s = max(0.0, self._heavy_from - self._now())
            self._alarm = asyncio.get_running_loop().call_later(pause_s, self._ring)

    def _ring(self) -> None:
        """Give the turn to the next heavy request; the one after it comes when that was charged."""
        self._alarm = None
        if self._heavy_from > self._now():
            self._set_alarm()
            return
        while self._heavy:
            asked = self._heavy.popleft()
            if not asked.done():
                asked.set_result(None)
                return
