"""Whose request is worked on next, on an event loop that all sessions share."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

BURST_S = 0.5
SHARE = 0.1
HEAVY_SHARE = 0.25
_ALONE_S = 1.0


@dataclass(slots=True)
class _Account:
    spent_s: float = 0.0
    settled_at: float = 0.0


class Turns:
    """Gives the loop to one request at a time, so that no session takes it from the others.

    A session is light while the seconds that its requests took, less `SHARE` of the time that passed, are within
    `BURST_S`. Light sessions go first, in the order of asking. All others together get `HEAVY_SHARE` of the time, each
    in its turn, unless a session is alone: then nobody is waiting for anything.
    """

    def __init__(self, *, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._light: deque[asyncio.Future[None]] = deque()
        self._heavy: deque[asyncio.Future[None]] = deque()
        self._accounts: dict[str, _Account] = {}
        self._is_taken = False
        self._heavy_from = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._last = ""
        self._others_at = -_ALONE_S
        """When two sessions were last seen one after the other."""

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncGenerator[None]:
        """Wait for the session's turn, and charge it for what happens in the block.

        The block may let others run only for moments: the loop is not given to any other request before it ends.
        """
        await self._wait(session_id)
        began = self._now()
        try:
            yield
        finally:
            self._charge(session_id, began)
            self._next()

    def forget(self, session_id: str) -> None:
        """Close the account of a session that is over."""
        self._accounts.pop(session_id, None)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._light) + len(self._heavy)

    async def _wait(self, session_id: str) -> None:
        now = self._now()
        if session_id != self._last:
            self._last, self._others_at = session_id, now
        is_heavy = self._balance(session_id, now) > BURST_S and now - self._others_at < _ALONE_S
        if not self._is_taken and not self._light and not is_heavy:
            self._is_taken = True
            return
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._heavy if is_heavy else self._light).append(asked)
        if not self._is_taken:
            self._next()
        try:
            await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled():
                self._next()
            raise

    def _balance(self, session_id: str, now: float) -> float:
        account = self._accounts.setdefault(session_id, _Account(settled_at=now))
        account.spent_s = max(0.0, account.spent_s - SHARE * (now - account.settled_at))
        account.settled_at = now
        return account.spent_s

    def _charge(self, session_id: str, began: float) -> None:
        now = self._now()
        account = self._accounts.get(session_id)
        if account is None:
            return
        was_heavy = self._balance(session_id, now) > BURST_S
        account.spent_s += now - began
        if was_heavy:
            self._heavy_from = now + (now - began) * (1 / HEAVY_SHARE - 1)

    def _next(self) -> None:
        """Give the loop to whoever is next, or back."""
        self._is_taken = False
        for queue in (self._light, self._heavy):
            if queue is self._heavy and self._heavy and not self._may_be_heavy():
                return
            while queue:
                asked = queue.popleft()
                if not asked.done():
                    self._is_taken = True
                    asked.set_result(None)
                    return

    def _may_be_heavy(self) -> bool:
        """Return whether a heavy request may go now; if not, come back when it may."""
        pause_s = self._heavy_from - self._now()
        if pause_s > 0 and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(pause_s, self._ring)
        return pause_s <= 0

    def _ring(self) -> None:
        self._alarm = None
        if not self._is_taken:
            self._next()
