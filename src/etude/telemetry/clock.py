"""Time that can be owned."""

import asyncio
from datetime import UTC, datetime
from time import monotonic


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds."""
        await asyncio.sleep(seconds)


class ManualClock:
    """Time that passes only when someone sleeps or says so: the double for every wait.

    A sleeper does not really wait: it moves the clock on and lets others run, so a test of an hour takes no time.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds passed so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    async def sleep(self, seconds: float) -> None:
        """Move the clock on at once, and let every other task run a turn."""
        self.advance(max(0.0, seconds))
        await asyncio.sleep(0)


def wall_time() -> float:
    """Return seconds since 1970 in UTC, for records that people compare across machines."""
    return datetime.now(UTC).timestamp()
