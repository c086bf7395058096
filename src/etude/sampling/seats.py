"""What a router knows of one sampler, and what asking it would cost."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from etude.types import Completion, SampleRequest, SamplerStatus

ELSEWHERE = 1.5
"""How many times as expensive a sampler in another region is."""
SMOOTHING = 0.2
COOLDOWN_S = 0.5
COOLDOWN_MAX_S = 10.0


class Replica(Protocol):
    """A sampler as the router sees it; `SamplerClient` is one."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Raise `SamplerError`, or a kind of it, by a deadline."""
        ...

    async def status(self) -> Sequence[SamplerStatus]:
        """Raise `SamplerError` within seconds."""
        ...


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms a pool's samplers are to be had."""

    price: float = 1.0
    """Of a second, in any unit that all pools share."""
    region: str = ""
    """Where they are; empty: wherever whoever asks is."""


@dataclass(slots=True, eq=False)
class Seat:
    """One sampler."""

    replica: Replica
    terms: Terms
    outstanding: int = 0
    """Requests that it was chosen for and has not answered."""
    token_s: float = 0.0
    """Seconds per drawn token, as requests experienced it lately; 0 before the first one."""
    version: int | None = None
    """That it drew with or told last."""
    failures: int = 0
    """In a row; above 0 the replica is asked for its health before anything else."""
    retry_at: float = 0.0
    quarantine: str = ""
    """Why it serves nothing; empty when it serves."""
    draining: bool = False
    """It gets no session that is not its own already."""
    drawing: set["asyncio.Future[Completion]"] = field(default_factory=set["asyncio.Future[Completion]"])
    """Requests that it was given and has not answered."""

    def leave(self) -> None:
        """Count one request less."""
        self.outstanding -= 1

    def abandon(self) -> None:
        """Take back what it is drawing, for another replica to draw."""
        for request in self.drawing:
            request.cancel()

    def cost(self, *, region: str, fastest: float) -> float:
        """Return what a token of one more request may cost: seconds, times price, times distance.

        A replica without history counts as one that needs `fastest` seconds per token.
        """
        distance = ELSEWHERE if self.terms.region and region and self.terms.region != region else 1.0
        return (self.outstanding + 1) * (self.token_s or fastest) * self.terms.price * distance

    def is_behind(self, request: SampleRequest) -> bool:
        """Return whether it would refuse a request for the version that it held when last heard of."""
        if self.version is None:
            return False
        if request.exact_version is not None:
            return self.version != request.exact_version
        return request.min_version is not None and self.version < request.min_version

    def note_status(self, status: SamplerStatus) -> None:
        """Learn from what the sampler says of itself."""
        self.version, self.draining = status.version, status.draining

    def note_success(self, completion: Completion, seconds: float) -> None:
        """Learn from a request that it served."""
        self.failures = 0
        self.version = completion.versions[-1].version if completion.versions else self.version
        token_s = seconds / max(1, len(completion.token_ids))
        self.token_s += (SMOOTHING if self.token_s else 1.0) * (token_s - self.token_s)

    def note_failure(self, now: float) -> None:
        """Leave it alone for a while, longer with each failure."""
        self.failures += 1
        self.retry_at = now + min(COOLDOWN_S * 2 ** (self.failures - 1), COOLDOWN_MAX_S)
