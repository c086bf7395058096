"""What a session may still spend: calls, drawn tokens, time."""

import math
from collections.abc import Callable
from time import monotonic

from etude.gateway import refusals
from etude.gateway.refusals import CallRefusedError
from etude.interfaces import SessionSpec


class Limits:
    """The account of one session.

    A call reserves all tokens that it may draw, so that calls at the same time do not exceed the limit together, and
    gives back what it did not draw.
    """

    def __init__(self, spec: SessionSpec, *, now: Callable[[], float] = monotonic) -> None:
        """Begin to count, seconds too."""
        self.calls = 0
        """Calls that were admitted."""
        self.reached = ""
        """The limit that the last call ran into: `calls`, `session_tokens`, `deadline`, `context`; empty if none."""
        self._spec = spec
        self._now = now
        self._ends_at = math.inf if spec.deadline_s is None else now() + spec.deadline_s
        self._tokens = 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the session's deadline, at least 0; infinite without one."""
        return max(0.0, self._ends_at - self._now())

    def tokens_left(self) -> int:
        """Return how many tokens one more call may draw; raise `CallRefusedError` when there may be no such call."""
        left = self._spec.max_session_tokens - self._tokens
        if self.calls >= self._spec.max_calls:
            raise self.refuse("calls")
        if left <= 0:
            raise self.refuse("session_tokens")
        if not self.seconds_left:
            raise self.refuse("deadline")
        return left

    def reserve(self, tokens: int) -> None:
        """Count a call, and the tokens that it may draw."""
        self.calls += 1
        self._tokens += tokens

    def give_back(self, tokens: int) -> None:
        """Take back what a call reserved and did not draw."""
        self._tokens -= tokens

    def refuse(self, limit: str) -> CallRefusedError:
        """Note that a limit was reached, and return what the harness is told."""
        self.reached = limit
        return refusals.limit_reached(limit)
