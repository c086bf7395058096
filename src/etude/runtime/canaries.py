"""A look at every sampler after every swap: a short text scored, and the digest of what the engine holds.

The trainer scores the text at each version that it makes. One that was made and followed by the next between two looks
is not looked at: what is wrong with a sampler stays wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from etude.config import RunConfig
from etude.errors import EtudeError, RunError, SamplerError
from etude.runtime.drift import Drift
from etude.runtime.probe_comparison import Tolerance, compare, floats, tolerance_of
from etude.runtime.probe_text import ProbeText
from etude.runtime.probes import ProbedSampler, Scorer, held_defect
from etude.training.records import TrainerStatus
from etude.types import SamplerStatus, SamplingParams, Scored, ScoreRequest
from etude.weight_types import Head

_VERSIONS_KEPT = 64
_CONFIRMED = 2
"""Looks in a row that must find the same fault."""

Place = tuple[str, int]
"""Lineage and version."""


class Trainer(Scorer, Protocol):
    """A trainer; `TrainerClient` is one."""

    async def health(self) -> TrainerStatus:
        """Raise `RunError` when it cannot answer."""
        ...


class Samplers(Protocol):
    """The samplers in service; `Roster` is one."""

    def serving(self) -> Mapping[str, ProbedSampler]:
        """Return them by name."""
        ...

    def quarantine(self, name: str, reason: str) -> None:
        """Put one out of service for good."""
        ...


class _Pool(NamedTuple):
    tolerance: Tolerance
    drift: Drift


class Canaries:
    """Looks at all samplers in a task of its own; an async context manager, watched like any part of the run."""

    name = "canaries"

    def __init__(
        self,
        text: ProbeText,
        config: RunConfig,
        *,
        trainer: Callable[[], Trainer],
        samplers: Samplers,
        read_head: Callable[[], Awaitable[Head | None]],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Look at the first drawn tokens of `text` every `supervision.heartbeat_s` seconds where there is news."""
        self._text = text.short()
        self._config = config
        self._trainer = trainer
        self._samplers = samplers
        self._read_head = read_head
        self._note = note
        params = SamplingParams(temperature=config.sampling.temperature, top_p=1.0, top_k=0)
        self._request = ScoreRequest(token_ids=self._text.token_ids, drawn_from=self._text.drawn_from, params=params)
        self._pools = {pool.name: _Pool(tolerance_of(pool), Drift()) for pool in config.pools}
        self._values: dict[Place, Scored] = {}
        """The trainer's canary."""
        self._held: dict[tuple[str, Place], tuple[str, str]] = {}
        """By view and place: what was held, and by which sampler."""
        self._seen: dict[str, Place] = {}
        self._doubts: dict[str, int] = {}
        self._gaps: dict[str, float] = {}
        self._growing: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Canaries":
        self._task = asyncio.create_task(self._run(), name="canaries")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def watch(self) -> None:
        """Wait until looking fails by a mistake of its own, and raise it."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def metrics(self) -> dict[str, float]:
        """Return the last gap of each pool and how fast it grows."""
        gaps = {f"probe/gap_nats/{name}": gap for name, gap in self._gaps.items()}
        return gaps | {f"probe/gap_slope/{name}": self._pools[name].drift.slope for name in self._gaps}

    async def look(self) -> None:
        """Look at the trainer's version and then at every sampler whose version was not looked at."""
        try:
            await self._look_at_trainer()
        except EtudeError:
            return  # it is being started anew, or the head cannot be read now; both have owners
        for name, sampler in self._samplers.serving().items():
            try:
                defect = await self._look_at(name, sampler)
            except (SamplerError, RunError):
                continue  # mute, or gone on: the roster's affair
            self._judge(name, defect)

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._config.supervision.heartbeat_s)

    async def _look_at_trainer(self) -> None:
        status, head = await self._trainer().health(), await self._read_head()
        if head is None or status.version < head.version or (head.lineage, status.version) in self._values:
            return  # nothing is published, steps are being repeated, or nothing is new
        scored = await self._trainer().score(self._request)
        self._values[head.lineage, scored.version] = scored
        for old in list(self._values)[:-_VERSIONS_KEPT]:
            del self._values[old]

    async def _look_at(self, name: str, sampler: ProbedSampler) -> str:
        """Return what is wrong with a sampler, empty when nothing is or nothing is known."""
        [status] = await sampler.status()
        place = (status.lineage, status.version)
        if status.fault or self._seen.get(name) == place:
            return ""
        defect = held_defect(status, self._config) or self._peers_defect(name, status)
        told = self._values.get(place)
        if defect or told is None:
            return defect
        scored = await sampler.score(replace(self._request, exact_version=status.version))
        finding = compare(self._text, self._request, scored, told, self._pools[status.pool].tolerance)
        if not finding.defect:
            self._seen[name] = place
            self._track(status, float(abs(floats(scored.logprobs) - floats(told.logprobs)).mean()))
        return finding.defect and f"at version {status.version}: {finding.defect}"

    def _judge(self, name: str, defect: str) -> None:
        self._doubts[name] = self._doubts.get(name, 0) + 1 if defect else 0
        if self._doubts[name] >= _CONFIRMED:
            self._doubts[name] = 0
            self._samplers.quarantine(name, f"differs from the trainer {defect}")

    def _peers_defect(self, name: str, status: SamplerStatus) -> str:
        """Say when two samplers hold one version in one view with different bytes; who came first is believed."""
        key = (status.view, (status.lineage, status.version))
        held, holder = self._held.setdefault(key, (status.held, name))
        for old in list(self._held)[:-_VERSIONS_KEPT]:
            del self._held[old]
        if held == status.held:
            return ""
        return f"at version {status.version}: it holds {status.held[:16]} and {holder} holds {held[:16]}"

    def _track(self, status: SamplerStatus, gap: float) -> None:
        pool = status.pool
        drift = self._pools[pool].drift
        growing = drift.add(status.version, gap)
        self._gaps[pool] = gap
        if growing and pool not in self._growing:
            self._note(
                f"the samplers of pool {pool} drift away from the trainer: the gap is {gap:.2g} nats and grows by "
                f"{drift.slope:.2g} per version; compare engine and precision with another pool's"
            )
        self._growing = self._growing | {pool} if growing else self._growing - {pool}
