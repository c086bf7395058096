"""Pass rates with honest intervals: attempts at one task are not independent of each other."""

import math
import random
from collections.abc import Sequence

import msgspec

_Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

_TAIL = 0.025


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What the scored attempts at one task came to."""

    passed: int
    scored: int

    @property
    def rate(self) -> float:
        """Share of the scored attempts that passed; NaN without any."""
        return self.passed / self.scored if self.scored else math.nan


def pass_rate(tallies: Sequence[Tally]) -> float:
    """Return the share of all scored attempts that passed; NaN without any."""
    scored = sum(tally.scored for tally in tallies)
    return sum(tally.passed for tally in tallies) / scored if scored else math.nan


def pass_at_k(tally: Tally, k: int) -> float:
    """Return the chance that at least one of k attempts, drawn from those scored, passed; NaN with fewer than k.

    Unbiased: 1 - C(n-c, k) / C(n, k). With 2 of 8 passed: 0.25 at k = 1, 0.7857 at k = 4.
    """
    if tally.scored < k:
        return math.nan
    return 1.0 - math.comb(tally.scored - tally.passed, k) / math.comb(tally.scored, k)


def mean_pass_at_k(tallies: Sequence[Tally], k: int) -> float:
    """Return `pass_at_k` averaged over the tasks with at least k scored attempts; NaN without any."""
    rates = [pass_at_k(tally, k) for tally in tallies if tally.scored >= k]
    return sum(rates) / len(rates) if rates else math.nan


def wilson_interval(rate: float, count: float) -> tuple[float, float]:
    """Return the 95 % score interval of a rate seen over `count` independent trials."""
    if not count:
        return (0.0, 1.0)
    spread = _Z95**2 / count
    centre = (rate + spread / 2) / (1 + spread)
    half = _Z95 * math.sqrt(rate * (1 - rate) / count + spread / (4 * count)) / (1 + spread)
    return (max(0.0, centre - half), min(1.0, centre + half))


def clustered_interval(tallies: Sequence[Tally], *, seed: int, resamples: int = 2000) -> tuple[float, float]:
    """Return a 95 % interval of `pass_rate` for other tasks of the same kind, by resampling whole tasks.

    Where all tasks agree, resampling would claim certainty: Wilson's interval over the tasks stands in.
    """
    known = [tally for tally in tallies if tally.scored]
    if len({tally.rate for tally in known}) <= 1:
        return wilson_interval(known[0].rate if known else 0.0, len(known))
    draws = random.Random(seed)
    rates = sorted(pass_rate(draws.choices(known, k=len(known))) for _ in range(resamples))
    last = resamples - 1
    return (rates[math.floor(_TAIL * last)], rates[math.ceil((1 - _TAIL) * last)])
