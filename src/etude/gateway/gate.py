"""A door between the sessions and the sampler that somebody who changes weights can shut."""

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import Literal

from msgspec.structs import replace

from etude.errors import SamplerBusyError
from etude.interfaces import Sampler
from etude.types import Completion, SampleRequest, SamplerStatus

PauseMode = Literal["drain", "abort", "keep"]


class Gate:
    """Implements `Sampler` over another one, and can be paused.

    While it is paused, requests are refused as those of a busy sampler: a harness is told to try again, and the call
    that it repeats is asked for with the same request id.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._drawing: set[asyncio.Task[object]] = set()
        """Tasks that wait for the sampler."""
        self._aborted: set[asyncio.Task[object]] = set()
        self.paused: PauseMode | Literal[""] = ""
        """How; empty while requests go through."""
        self.weight_version: int | None = None
        """What `resume` was told last: calls that are drawn from then on are drawn by this version or a later one."""
        self.num_drawn = 0
        """Requests that were answered."""
        self.tokens_drawn = 0
        self.seconds = 0.0
        """That the sampler took for them, one after the other."""

    @property
    def in_flight(self) -> int:
        """Requests that the sampler has not answered."""
        return len(self._drawing)

    async def sample(self, request: SampleRequest) -> Completion:
        """Return what the sampler draws; raise `SamplerBusyError` when it is paused, and what the sampler raises."""
        if self.paused:
            raise SamplerBusyError(f"request {request.request_id}: sampling is paused, ask again")
        asker = asyncio.current_task()
        assert asker is not None
        self._drawing.add(asker)
        began = perf_counter()
        try:
            completion = await self._sampler.sample(request)
        except asyncio.CancelledError:
            # Unless somebody else wants it to end as well.
            if asker in self._aborted and not asker.uncancel():
                raise SamplerBusyError(f"request {request.request_id} was aborted by a pause, ask again") from None
            raise
        finally:
            self._drawing.discard(asker)
            self._aborted.discard(asker)
        self.num_drawn += 1
        self.tokens_drawn += len(completion.token_ids)
        self.seconds += perf_counter() - began
        return completion

    async def status(self) -> Sequence[SamplerStatus]:
        """Return what the sampler says."""
        return await self._sampler.status()

    async def pause(self, mode: PauseMode, *, timeout_s: float = 600.0) -> int:
        """Let no request through before `resume`, and return how many are still in flight.

        `drain` returns when those in flight are answered, or after `timeout_s`; `abort` gives them up, for the
        harnesses to ask again; `keep` leaves them where they are, for an engine that holds them across the change.
        """
        self.paused = mode
        if mode == "abort":
            for asker in self._drawing - self._aborted:
                asker.cancel()
            self._aborted |= self._drawing
        if mode != "keep" and self._drawing:
            await asyncio.wait(set(self._drawing), timeout=timeout_s)
        return len(self._drawing)

    def resume(self, weight_version: int | None = None) -> None:
        """Let requests through; the version, if one is told, is the oldest that may answer them."""
        self.paused = ""
        if weight_version is not None:
            self.weight_version = weight_version


def drawn_since(request: SampleRequest, version: int | None) -> SampleRequest:
    """Return a request that no version older than this one may answer; one that names its version exactly keeps it.

    It has another id than the request before it, since a sampler may remember what an older version drew for that.
    """
    if version is None or request.exact_version is not None or (request.min_version or 0) >= version:
        return request
    return replace(request, request_id=f"{request.request_id}@{version}", min_version=version)
