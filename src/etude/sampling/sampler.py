"""An engine with versions: what a sampler process is around."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from etude.errors import SamplerBusyError, SampleRequestError, SamplerError, StoreError
from etude.interfaces import Ledger, StagedWeights, WeightSource
from etude.policy.digest import held_digest
from etude.policy.views import View, in_view
from etude.sampling.decode_loop import DecodeLoop, Held
from etude.sampling.engine import Commit, Engine, Forced
from etude.telemetry.doubles import NO_LEDGER
from etude.types import Completion, SampleRequest, SamplerStatus, Scored, ScoreRequest

_ID_LENGTH_MAX = 256
_STOP_IDS_MAX = 64
_TOP_K_MAX = 1024
_RAW_MAX = 16
_SWAP_ATTEMPTS = 2


@dataclass(slots=True)
class _Entry:
    request: SampleRequest
    future: asyncio.Future[Completion]
    askers: int = 0
    num_bytes: int = 0


class EngineSampler:
    """Serves completions of an engine's weights, and swaps the weights while it does.

    A request with a known id shares the completion that is being drawn, or was; failures are forgotten, so that asking
    again tries again. Use as an async context manager.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampler_id: str,
        pool: str,
        view: View,
        held: Held,
        max_queue: int = 256,
        version_wait_s: float = 2.0,
        swap_hold_s: float = 30.0,
        remember_bytes: int = 64 << 20,
        ledger: Ledger = NO_LEDGER,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: Used by this sampler alone.
            sampler_id: Of this process.
            pool: Its pool, named in completions.
            view: Precision of the engine's weights.
            held: What the engine's weights are.
            max_queue: Unfinished requests, running ones included; more are refused.
            version_wait_s: How long a request waits for a version that is not there yet.
            swap_hold_s: How long requests that a swap must not cross delay it; see `decode_loop`.
            remember_bytes: Bound on finished completions kept for repeated ids.
            ledger: Told what was drawn, and of all weights put in place.
        """
        self._engine = engine
        self._sampler_id = sampler_id
        self._view: View = view
        self._pool = pool
        self._max_queue = max_queue
        self._remember_bytes = remember_bytes
        self._ledger = ledger
        self._loop = DecodeLoop(
            engine,
            held,
            pool=pool,
            view=view,
            version_wait_s=version_wait_s,
            swap_hold_s=swap_hold_s,
            ledger=ledger,
        )
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unfinished = 0
        self._remembered = 0
        self._scores = 0
        self._draining = False
        self._leaving = False

    async def __aenter__(self) -> "EngineSampler":
        """Start the decode thread."""
        self._loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it; what is unfinished fails."""
        await asyncio.to_thread(self._loop.stop)

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the completion of a request, once the ledger says that it was drawn.

        Raises:
            VersionUnavailableError: The version asked for is not held, and did not come in time.
            ContextOverflowError: The prompt leaves no room for a token.
            SampleRequestError: A field makes no sense, or the id was used for another request.
            SamplerBusyError: The queue is full.
            SamplerError: The sampler is draining, its engine failed, or the disk does not take its ledger.
        """
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = self._open(request)
        elif entry.request != request:
            raise SampleRequestError(f"request id {request.request_id} was used for another request")
        entry.askers += 1
        try:
            completion = await asyncio.shield(entry.future)
        except asyncio.CancelledError:
            if entry.askers == 1:
                self._loop.cancel(request.request_id)
            raise
        finally:
            entry.askers -= 1
        try:
            await self._ledger.flush_local()
        except StoreError as error:
            raise SamplerError(f"sampler {self._sampler_id}: {error}") from error
        return completion

    async def status(self) -> Sequence[SamplerStatus]:
        """Return this sampler's state. Raise `SamplerError` when its engine has failed."""
        if self._loop.failure.done():
            raise SamplerError(str(self._loop.failure.exception()))
        loop = self._loop
        running, waiting = loop.counts
        return [
            SamplerStatus(
                sampler_id=self._sampler_id,
                pool=self._pool,
                view=self._view,
                lineage=loop.held.lineage,
                version=loop.held.version,
                digest=loop.held.digest,
                running=running,
                waiting=waiting,
                tokens_drawn=loop.tokens_drawn,
                steps=loop.steps,
                swaps=loop.swaps,
                swap_seconds_max=loop.swap_seconds_max,
                max_context=self._engine.max_context,
                held=loop.held_digest,
                fault=loop.fault,
                draining=self._leaving or self._draining,
            )
        ]

    async def score(self, request: ScoreRequest) -> Scored:
        """Decode given tokens as if they were drawn, beside the requests that are running.

        Raises:
            VersionUnavailableError: The version asked for is not held, or was left meanwhile.
            SampleRequestError: The request makes no sense.
            SamplerError: The engine failed.
        """
        ids, start = request.token_ids, request.drawn_from
        if not 0 < start < len(ids) <= self._engine.max_context:
            raise SampleRequestError(f"score: 0 < drawn_from ({start}) < tokens ({len(ids)}) must fit the context")
        if len(request.raw_positions) > _RAW_MAX or any(not start <= at < len(ids) for at in request.raw_positions):
            raise SampleRequestError(f"score: at most {_RAW_MAX} raw_positions, each of a drawn token")
        exact = self._loop.held.version if request.exact_version is None else request.exact_version
        self._scores += 1
        name = f"score/{self._scores}"
        asked = SampleRequest(
            request_id=name,
            session_id=name,
            prompt_ids=ids[:start],
            params=msgspec.structs.replace(request.params, stop_token_ids=()),
            exact_version=exact,
        )
        _check(asked)
        forced = Forced(token_ids=ids[start:], raw_draws=frozenset(at - start for at in request.raw_positions))
        return await asyncio.wrap_future(self._loop.score(asked, forced))

    async def stage(self, weights: StagedWeights) -> None:
        """Prepare weights while decoding goes on, then swap them in between two steps; return when they are in place.

        The held version again is nothing to do. An engine that holds something else afterwards gets the weights once
        more; if that does not help the sampler serves nothing until a later version, and `status` says why. Raise
        `SamplerError` for an older version of the same lineage, and `PolicyError` when the tensors do not fit.
        """
        held = self._loop.held
        target = Held(lineage=weights.lineage, version=weights.version, digest=weights.digest)
        if target == held:
            return
        if target.lineage == held.lineage and target.version <= held.version:
            raise SamplerError(f"version {target.version} cannot follow {held.version} in lineage {held.lineage}")
        for _ in range(_SWAP_ATTEMPTS):
            commit, expected = await asyncio.to_thread(self._prepare, weights)
            await asyncio.shield(asyncio.wrap_future(self._loop.swap(target, commit, expected=expected)))
            if not self._loop.fault:
                return

    async def follow(self, source: WeightSource) -> None:
        """Stage whatever the source yields, for as long as it does."""
        async for weights in source.staged():
            await self.stage(weights)

    def cancel(self, request_id: str) -> None:
        """Finish a request now, with what it has drawn; an unknown id is nothing to do."""
        self._loop.cancel(request_id)

    async def watch(self) -> None:
        """Wait until the engine fails, and raise its `SamplerError`: the process should end with it."""
        await asyncio.shield(asyncio.wrap_future(self._loop.failure))

    def leave(self) -> None:
        """Ask for no new sessions, through `status`; requests of those that it has are served as before."""
        self._leaving = True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the others; after `timeout_s` they finish as cancelled."""
        self._draining = True
        unfinished = [entry for entry in self._entries.values() if not entry.future.done()]
        if not unfinished:
            return
        _, late = await asyncio.wait([entry.future for entry in unfinished], timeout=timeout_s)
        for entry in unfinished:
            if entry.future in late:
                self.cancel(entry.request.request_id)
        if late:
            await asyncio.wait(late, timeout=timeout_s)

    def _prepare(self, weights: StagedWeights) -> tuple[Commit, str]:
        held = in_view(weights.tensors, self._view)
        return self._engine.stage(held), held_digest(held)

    def _open(self, request: SampleRequest) -> _Entry:
        _check(request)
        if self._draining:
            raise SamplerError(f"sampler {self._sampler_id} is draining; ask another one")
        if self._unfinished >= self._max_queue:
            raise SamplerBusyError(f"sampler {self._sampler_id} has {self._unfinished} unfinished requests; ask later")
        future = asyncio.wrap_future(self._loop.submit(request))
        entry = self._entries[request.request_id] = _Entry(request, future)
        self._unfinished += 1
        future.add_done_callback(lambda _: self._close(entry))
        return entry

    def _close(self, entry: _Entry) -> None:
        """Remember a completion, forget a failure, and make room."""
        self._unfinished -= 1
        if entry.future.cancelled() or entry.future.exception() is not None:
            del self._entries[entry.request.request_id]
            return
        entry.num_bytes = _num_bytes(entry)
        self._remembered += entry.num_bytes
        while self._remembered > self._remember_bytes:
            # Unfinished ones are few, so this looks at few.
            oldest = next((known for known in self._entries.values() if known.future.done()), None)
            if oldest is None:
                break
            self._remembered -= oldest.num_bytes
            del self._entries[oldest.request.request_id]


def _num_bytes(entry: _Entry) -> int:
    completion = entry.future.result()
    support, experts = completion.support, completion.experts
    arrays = len(completion.sampler_logprobs) * 3 + 8 * len(entry.request.prompt_ids)
    arrays += 0 if support is None else len(support.counts) + len(support.token_ids) + len(support.logprobs)
    return 1024 + arrays + (0 if experts is None else len(experts.expert_ids))


def _check(request: SampleRequest) -> None:
    params = request.params
    for what, holds in (
        ("request_id must have 1 to 256 characters", 0 < len(request.request_id) <= _ID_LENGTH_MAX),
        ("session_id must have at most 256 characters", len(request.session_id) <= _ID_LENGTH_MAX),
        ("temperature must be a number from 0", math.isfinite(params.temperature) and params.temperature >= 0),
        ("top_p must lie above 0 and at most at 1", 0 < params.top_p <= 1),
        ("top_k must lie between 0 and 1024", 0 <= params.top_k <= _TOP_K_MAX),
        ("max_tokens must be at least 1", params.max_tokens >= 1),
        ("at most 64 stop_token_ids", len(params.stop_token_ids) <= _STOP_IDS_MAX),
    ):
        if not holds:
            raise SampleRequestError(f"request {request.request_id[:_ID_LENGTH_MAX]}: {what}")
