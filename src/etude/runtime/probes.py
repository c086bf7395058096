"""Whether a sampler computes what the trainer computes, before it serves its first request.

Both look at one fixed text at equal weights; the trainer replays the sampler's supports and experts, as in training.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from etude.config import RunConfig
from etude.errors import RunError, SamplerError, VersionUnavailableError
from etude.interfaces import Ledger
from etude.runtime.probe_comparison import Finding, compare, tolerance_of
from etude.runtime.probe_text import ProbeText
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import Probed
from etude.types import SamplerStatus, SamplingParams, Scored, ScoreRequest

_TEMPERATURE = 0.7
"""One that is not applied would not show at 1."""
_RAW_POSITIONS = 4
_TRIES = 3
"""A trainer that repeats steps after a crash may have a version's number with other weights for a moment."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Scorer(Protocol):
    """A trainer, as far as probes ask it."""

    async def score(self, request: ScoreRequest) -> Scored:
        """Raise `RunError` when it cannot."""
        ...


class ProbedSampler(Protocol):
    """A sampler, as far as probes ask it; `SamplerClient` is one."""

    async def status(self) -> Sequence[SamplerStatus]:
        """Raise `SamplerError` when it cannot answer."""
        ...

    async def score(self, request: ScoreRequest) -> Scored:
        """Raise `SamplerError` when it cannot."""
        ...


class Prober:
    """Compares samplers with the trainer."""

    def __init__(
        self,
        text: ProbeText,
        config: RunConfig,
        *,
        trainer: Callable[[], Scorer],
        ledger: Ledger = NO_LEDGER,
        again_s: float = 0.2,
    ) -> None:
        """Look at `text`; `trainer` is asked for anew each time, for it may have been started anew.

        `again_s` is how long to wait for a trainer that is down or at another version.
        """
        self._text = text
        self._config = config
        self._trainer = trainer
        self._ledger = ledger
        self._again_s = again_s
        self._tolerances = {pool.name: tolerance_of(pool) for pool in config.pools}

    async def prove(self, name: str, sampler: ProbedSampler) -> None:
        """Return once a sampler agreed with the trainer at equal weights; the caller sets the deadline.

        Raises:
            SamplerError: It does not, or does not answer; the message names the first token that differs, and the cause
                if it is one of those that are known.
        """
        [status] = await sampler.status()
        text = self._text.fit(status.max_context)
        whole, scored = await self._agree(sampler, text, self._whole(text))
        narrow, _ = await self._agree(sampler, text, self._narrow(text))
        self._ledger.record(
            Probed(
                sampler=name,
                lineage=scored.lineage,
                version=scored.version,
                max_error=max(whole.max_error, narrow.max_error),
                experts_equal=min(whole.experts_equal, narrow.experts_equal),
            )
        )

    async def _agree(self, sampler: ProbedSampler, text: ProbeText, request: ScoreRequest) -> tuple[Finding, Scored]:
        """Return a comparison without a defect; raise `SamplerError` when there is none."""
        for _ in range(_TRIES - 1):
            finding, scored = await self._examine(sampler, text, request)
            if not finding.defect:
                return finding, scored
            await asyncio.sleep(self._again_s)
        finding, scored = await self._examine(sampler, text, request)
        if finding.defect:
            raise SamplerError(finding.defect)
        return finding, scored

    def _narrow(self, text: ProbeText) -> ScoreRequest:
        """Ask for the run's own distribution."""
        run = self._config.sampling
        params = SamplingParams(temperature=run.temperature, top_p=run.top_p, top_k=run.top_k)
        return ScoreRequest(token_ids=text.token_ids, drawn_from=text.drawn_from, params=params)

    def _whole(self, text: ProbeText) -> ScoreRequest:
        """Ask for untruncated distributions at a temperature, and for all of some of them."""
        drawn = len(text.token_ids) - text.drawn_from
        raw = tuple(text.drawn_from + place for place in range(0, drawn, max(1, drawn // _RAW_POSITIONS)))
        return ScoreRequest(
            token_ids=text.token_ids,
            drawn_from=text.drawn_from,
            params=SamplingParams(temperature=_TEMPERATURE, top_p=1.0, top_k=0),
            raw_positions=raw[:_RAW_POSITIONS],
        )

    async def _examine(self, sampler: ProbedSampler, text: ProbeText, request: ScoreRequest) -> tuple[Finding, Scored]:
        """Compare one request at equal versions, however often it takes to meet the trainer at one."""
        replays = self._config.algorithm
        while True:
            [status] = await sampler.status()
            defect = held_defect(status, self._config)
            if defect:
                raise SamplerError(defect)
            try:
                scored = await sampler.score(replace(request, exact_version=status.version))
                asked = replace(
                    request,
                    support=scored.support if replays.replay_support else None,
                    experts=scored.experts if replays.replay_experts else None,
                )
                trainer = await self._trainer().score(asked)
            except (RunError, VersionUnavailableError):
                # The trainer is being started anew, or the sampler went on meanwhile.
                await asyncio.sleep(self._again_s)
                continue
            if trainer.version == scored.version:
                return compare(text, asked, scored, trainer, self._tolerances[status.pool]), scored
            await asyncio.sleep(self._again_s)


def held_defect(status: SamplerStatus, config: RunConfig) -> str:
    """Return why a sampler's memory does not hold the version that it claims, empty when it does or nobody knows."""
    if status.fault:
        return status.fault
    if _DTYPES.get(status.view) != config.weights.dtype or status.held == status.digest:
        return ""
    return f"its engine holds {status.held[:16]} and not version {status.version}, which is {status.digest[:16]}"
