"""The thread that owns an engine: admits by version, steps, swaps weights between steps, stamps what was drawn.

How a swap meets requests that it must not cross:

- Requests without `exact_version` run on across it; their tokens are stamped run by run.
- Requests with `exact_version` delay it, for at most `swap_hold_s`; those still running then fail with
  `VersionUnavailableError`. While a swap waits, further requests for exactly the old version are refused.
- A new lineage must not share a completion with the old one: everything running delays it in the same way, and
  nothing is admitted meanwhile.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from etude.errors import SamplerError, StoreError, VersionUnavailableError
from etude.interfaces import Ledger
from etude.sampling.engine import Answer, Commit, Engine, Forced
from etude.telemetry import digests
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import Applied, Drawn
from etude.types import Completion, FinishReason, SampleRequest, Scored, VersionRun


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a set of weights."""

    lineage: str
    version: int
    digest: str


@dataclass(slots=True)
class _Job:
    request: SampleRequest
    deadline: float
    """Until when it waits for its version."""
    forced: Forced | None = None
    """Given draws, of a request that is scored and not sampled."""
    future: Future[Any] = field(default_factory=Future[Any])
    versions: list[VersionRun] = field(default_factory=list[VersionRun])
    stamped: int = 0

    def stamp(self, version: int, drawn: int) -> None:
        """Note that what was drawn since the last stamp was drawn under `version`."""
        if drawn > self.stamped:
            self.versions.append(VersionRun(version, drawn - self.stamped))
            self.stamped = drawn


@dataclass(slots=True)
class _Swap:
    target: Held
    commit: Commit
    deadline: float
    expected: str
    """What the engine must hold then."""
    done: Future[None] = field(default_factory=Future[None])


class DecodeLoop:
    """Runs an engine in a thread of its own. All public methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        held: Held,
        *,
        pool: str,
        view: str = "",
        version_wait_s: float = 2.0,
        swap_hold_s: float = 30.0,
        ledger: Ledger = NO_LEDGER,
    ) -> None:
        """Wrap an engine that holds `held`; `start` begins.

        Args:
            engine: Touched by the loop's thread only.
            held: What the engine's weights are.
            pool: Named in completions.
            view: Precision of the engine's weights, named in the ledger.
            version_wait_s: How long a request waits for a version that is not there yet.
            swap_hold_s: How long requests that a swap must not cross delay it.
            ledger: Told of all weights put in place and, before anybody else, of what was drawn.
        """
        self.held = held
        self.failure: Future[None] = Future()
        """Fails when the engine does; never succeeds before `stop`."""
        self.held_digest = engine.held_digest()
        """Of the engine's memory after the last swap."""
        self.fault = ""
        """Why nothing is served until the next swap; empty when all is well."""
        self.tokens_drawn = 0
        self.steps = 0
        self.swaps = 0
        self.swap_seconds_max = 0.0
        self._engine = engine
        self._pool = pool
        self._view = view
        self._ledger = ledger
        self._version_wait_s = version_wait_s
        self._swap_hold_s = swap_hold_s
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._swaps: deque[_Swap] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests running and waiting."""
        return len(self._running), len(self._waiting)

    def start(self) -> None:
        """Begin to serve."""
        self._note_applied()
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its step; unfinished requests fail. Raise `SamplerError` when it does not end."""
        self._post(self._stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SamplerError(f"the engine's step did not end within {timeout_s} s")

    def submit(self, request: SampleRequest) -> Future[Completion]:
        """Queue a request."""
        return self._queue(request, None)

    def score(self, request: SampleRequest, forced: Forced) -> Future[Scored]:
        """Queue a request for exactly one version whose draws are given."""
        return self._queue(request, forced)

    def cancel(self, request_id: str) -> None:
        """Finish a request as cancelled; unknown ones are ignored."""
        self._post(lambda: self._cancel(request_id))

    def swap(self, target: Held, commit: Commit, *, expected: str) -> Future[None]:
        """Queue staged weights; done when they are in place.

        If the engine's memory then has another digest than `expected`, nothing is served until a later swap: `fault`.
        """
        swap = _Swap(target, commit, time.monotonic() + self._swap_hold_s, expected)
        self._post(lambda: self._swaps.append(swap), swap.done)
        return swap.done

    def _queue(self, request: SampleRequest, forced: Forced | None) -> Future[Any]:
        job = _Job(request, time.monotonic() + self._version_wait_s, forced)
        self._post(lambda: self._waiting.append(job), job.future)
        return job.future

    def _post(self, action: Callable[[], None], future: Future[Any] | None = None) -> None:
        if future is not None:
            future.set_running_or_notify_cancel()  # from here on only the loop ends it
        self._inbox.put((action, future))
        if self.failure.done():
            self._refuse_inbox()

    def _run(self) -> None:
        try:
            while True:
                self._read_inbox()
                if self._stopped:
                    break
                self._swap_if_free()
                self._admit()
                if not self._running:
                    self._sleep()
                    continue
                for answer in self._engine.step():
                    self._finish(answer)
                self.steps += 1
        except Exception as error:  # noqa: BLE001 - becomes the failure of every request and of the process
            self._fail(SamplerError(f"the engine failed: {type(error).__name__}: {error}"))
        else:
            self._fail(SamplerError("the sampler has stopped"))

    def _read_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()[0]()

    def _sleep(self) -> None:
        """With nothing to decode, wait for a message, or until a request has waited long enough for its version."""
        deadlines = [job.deadline for job in self._waiting]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=timeout)[0]()

    def _admit(self) -> None:
        kept: deque[_Job] = deque()
        now = time.monotonic()
        while self._waiting:
            job = self._waiting.popleft()
            if self.fault:
                job.future.set_exception(SamplerError(self.fault))
                continue
            refusal = self._refusal(job.request)
            if refusal is None and (self._engine.free_slots < 1 or self._changes_lineage()):
                kept.append(job)
            elif refusal is None:
                self._begin(job)
            elif self._may_come(job.request) and now < job.deadline:
                kept.append(job)
            else:
                job.future.set_exception(VersionUnavailableError(refusal))
        self._waiting = kept

    def _begin(self, job: _Job) -> None:
        try:
            self._engine.admit(job.request, job.forced)
        except SamplerError as error:
            job.future.set_exception(error)
        else:
            self._running[job.request.request_id] = job

    def _refusal(self, request: SampleRequest) -> str | None:
        """Why the held version does not serve the request."""
        least, exact, held = request.min_version, request.exact_version, self.held.version
        if (least is None or held >= least) and (exact is None or (held == exact and not self._swaps)):
            return None
        wish = f"at least {least}" if exact is None else f"exactly {exact}"
        leaving = " and is about to leave it" if self._swaps else ""
        return f"request {request.request_id} asks for {wish}; this sampler holds version {held}{leaving}"

    def _may_come(self, request: SampleRequest) -> bool:
        return max(request.min_version or 0, request.exact_version or 0) > self.held.version

    def _changes_lineage(self) -> bool:
        return bool(self._swaps) and self._swaps[0].target.lineage != self.held.lineage

    def _swap_if_free(self) -> None:
        while self._swaps:
            swap = self._swaps[0]
            crossing = self._changes_lineage()
            blockers = [job for job in self._running.values() if crossing or job.request.exact_version is not None]
            if blockers and time.monotonic() < swap.deadline:
                return
            for job in blockers:
                self._engine.cancel(job.request.request_id)
                del self._running[job.request.request_id]
                name, kept = job.request.request_id, f"was kept for {self._swap_hold_s:g} s, no longer"
                message = f"request {name}: version {self.held.version} {kept}"
                job.future.set_exception(VersionUnavailableError(message))
            self._commit(swap)
            self._swaps.popleft()
            swap.done.set_result(None)

    def _commit(self, swap: _Swap) -> None:
        started = time.perf_counter()
        for request_id, drawn in swap.commit().items():
            self._running[request_id].stamp(self.held.version, drawn)
        self.held = swap.target
        self.held_digest = self._engine.held_digest()
        self.fault = ""
        self._note_applied()
        if self.held_digest != swap.expected:
            self._stop_serving(swap)
        self.swaps += 1
        self.swap_seconds_max = max(self.swap_seconds_max, time.perf_counter() - started)

    def _stop_serving(self, swap: _Swap) -> None:
        self.fault = (
            f"after the swap to version {swap.target.version} the engine holds {self.held_digest[:16]} and not "
            f"{swap.expected[:16]}: an update was lost; out of service until the next version"
        )
        for request_id, job in self._running.items():
            self._engine.cancel(request_id)
            job.future.set_exception(SamplerError(self.fault))
        self._running.clear()

    def _finish(self, answer: Answer) -> None:
        job = self._running.pop(answer.request_id)
        if answer.failure:
            job.future.set_exception(SamplerError(f"version {self.held.version}: {answer.failure}"))
            return
        if job.forced is not None:
            job.future.set_result(self._scored(answer))
            return
        job.stamp(self.held.version, len(answer.token_ids))
        self.tokens_drawn += len(answer.token_ids)
        completion = Completion(
            token_ids=answer.token_ids,
            sampler_logprobs=answer.sampler_logprobs,
            versions=tuple(job.versions),
            finish_reason=answer.finish_reason,
            pool=self._pool,
            lineage=self.held.lineage,
            support=answer.support,
            experts=answer.experts,
            cached_tokens=answer.cached_tokens,
        )
        try:
            self._note_drawn(job.request, completion)
        except StoreError as error:
            job.future.set_exception(SamplerError(str(error)))
            raise
        job.future.set_result(completion)

    def _scored(self, answer: Answer) -> Scored:
        return Scored(
            logprobs=answer.sampler_logprobs,
            support=answer.support,
            experts=answer.experts,
            raw=answer.raw,
            lineage=self.held.lineage,
            version=self.held.version,
        )

    def _note_applied(self) -> None:
        held = self.held
        self._ledger.record(
            Applied(
                lineage=held.lineage,
                version=held.version,
                digest=held.digest,
                held=self.held_digest,
                view=self._view,
            )
        )

    def _note_drawn(self, request: SampleRequest, completion: Completion) -> None:
        if not completion.token_ids:
            return
        self._ledger.record(
            Drawn(
                request=request.request_id,
                prompt=len(request.prompt_ids),
                prompt_digest=digests.of_ids(request.prompt_ids),
                tokens=len(completion.token_ids),
                digest=digests.of_drawn(completion),
                versions=tuple((run.version, run.count) for run in completion.versions),
                lineage=completion.lineage,
            )
        )

    def _cancel(self, request_id: str) -> None:
        for job in self._waiting:
            if job.request.request_id == request_id:
                self._waiting.remove(job)
                self._running[request_id] = job
                self._finish(Answer(request_id=request_id, finish_reason=FinishReason.CANCELLED))
                return
        answer = self._engine.cancel(request_id)
        if answer is not None:
            self._finish(answer)

    def _stop(self) -> None:
        self._stopped = True

    def _fail(self, error: SamplerError) -> None:
        self.failure.set_exception(error)
        for job in (*self._running.values(), *self._waiting):
            job.future.set_exception(error)
        for swap in self._swaps:
            swap.done.set_exception(error)
        self._running.clear()
        self._waiting.clear()
        self._swaps.clear()
        self._refuse_inbox()

    def _refuse_inbox(self) -> None:
        """Fail what was asked for after the end, or too shortly before it to be read."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, future = self._inbox.get_nowait()
                if future is not None:
                    future.set_exception(SamplerError("the sampler has stopped"))
