"""What is wrong with a sampler that says it is well: found from outside, by what it answers."""

import statistics
from collections.abc import Mapping

import msgspec

from etude.types import SamplerStatus
from etude.weight_types import Head

_SLOW_TIMES = 50.0
"""How much slower than the middle one of its peers a sampler may be."""
_SLOW_TOKEN_S = 0.5
"""Seconds per token below which nobody is called slow."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler was started as."""

    sampler_id: str
    pool: str
    view: str


class Observation(msgspec.Struct, kw_only=True):
    """What was seen of a sampler since it came up."""

    now: float
    answered_at: float
    status: SamplerStatus | None = None
    followed_at: float = 0.0
    """When it last was at the head, or came nearer to it."""
    stepped_at: float = 0.0
    """When it last was idle, or had taken a decoding step."""
    well_at: float = 0.0
    """When it last had no fault of its own."""
    was_silent: bool = False
    """Whether it did not answer the last time."""

    def note(self, status: SamplerStatus | None, head: Head | None, now: float) -> None:
        """Add what it answered now, None when it did not."""
        self.now = now
        if status is None:
            self.was_silent = True
            return
        if self.was_silent:
            # What it did not do while it was silent is no second offence.
            self.followed_at = self.stepped_at = self.well_at = now
            self.was_silent = False
        before, self.status = self.status, status
        self.answered_at = now
        if head is None or is_at(status, head) or before is None or held(status) != held(before):
            self.followed_at = now
        if not status.running or before is None or status.steps != before.steps:
            self.stepped_at = now
        if not status.fault:
            self.well_at = now


def held(status: SamplerStatus) -> tuple[str, int]:
    """Return lineage and version of what a sampler holds."""
    return status.lineage, status.version


def is_at(status: SamplerStatus, head: Head) -> bool:
    """Whether a sampler holds the newest version."""
    return held(status) == (head.lineage, head.version)


def defect(seen: Observation, expected: Expected, head: Head | None, *, patience_s: float) -> str:
    """Return why a sampler has to be replaced, empty when it has not.

    `patience_s` is for what may be a matter of time: following the head, decoding, recovering from a fault.
    """
    status, now = seen.status, seen.now
    if status is None or seen.was_silent:
        return ""
    claimed = Expected(sampler_id=status.sampler_id, pool=status.pool, view=status.view)
    if claimed != expected:
        return f"is {claimed.sampler_id} of pool {claimed.pool} in {claimed.view}, not what was started"
    if head is not None and is_at(status, head) and status.digest != head.digest:
        return f"holds other weights than version {head.version} of lineage {head.lineage}"
    if head is not None and now - seen.followed_at > 2 * patience_s:
        return f"stays at version {status.version} of lineage {status.lineage} while the head is {head.version}"
    if now - seen.stepped_at > patience_s:
        return f"has taken no decoding step for {patience_s:g} s"
    if now - seen.well_at > patience_s:
        return f"does not recover: {status.fault}"
    return ""


def suspicion(seen: Observation, *, patience_s: float) -> str:
    """Return why a sampler should serve nothing for now, empty when it may."""
    if seen.now - seen.answered_at > patience_s / 2:
        return f"has not answered for {patience_s / 2:g} s"
    return "" if seen.status is None else seen.status.fault


def slow(token_s: Mapping[str, float]) -> dict[str, str]:
    """Return which samplers are slow beyond reason, by name, from the seconds that a token took lately."""
    known = {name: seconds for name, seconds in token_s.items() if seconds}
    found: dict[str, str] = {}
    for name, seconds in known.items():
        others = [other for peer, other in known.items() if peer != name]
        if others and seconds > max(_SLOW_TOKEN_S, _SLOW_TIMES * statistics.median(others)):
            found[name] = f"takes {seconds:.2g} s per token, {seconds / statistics.median(others):.0f} times its peers"
    return found
