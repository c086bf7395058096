"""One attempt at a task, from sandbox to reward."""

import asyncio
import math
import secrets
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from time import perf_counter

from etude.config import HarnessSection
from etude.errors import EtudeError, HarnessError, SamplerError, SandboxError
from etude.interfaces import (
    Environment,
    EnvironmentBackend,
    ExecResult,
    Grade,
    Grader,
    Ledger,
    SessionHost,
    SessionRecord,
    SessionSpec,
)
from etude.rollout.harness import harness_command, harness_name, harness_variables
from etude.rollout.identity import HarnessIdentity
from etude.rollout.record import RolloutRecord
from etude.rollout.untrusted import cut
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import RolloutStarted
from etude.telemetry.waits import waiting
from etude.types import Failure, Outcome, SamplingParams, Task, Trajectory

_CANNOT_START = (126, 127)
"""What a shell answers for a program that is not executable or does not exist."""

_MESSAGE_CHARS = 2000
_REASON_CHARS = 60
_OUTAGE_SHARE = 0.05
"""Of an agent's time, without samplers, from which on running out of time says nothing about the policy."""


class _Attempt:
    """What is known so far about an attempt; whatever ends it, this much is reported."""

    def __init__(self) -> None:
        self._started = perf_counter()
        self.timings: dict[str, float] = {}
        self.session = SessionRecord(nodes=(), messages=())
        self.exit_code: int | None = None
        self.outcome = Outcome.INFRA_ERROR
        self.reward: float | None = None
        self.failure: Failure | None = None
        self.metrics: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, component: str) -> Generator[None]:
        """Add the block's seconds to a stage, and blame its first error on a component."""
        started = perf_counter()
        try:
            yield
        except EtudeError as error:
            if self.failure is None:
                self.fail(_blamed(error, component), _reason(error), str(error))
            raise
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + perf_counter() - started

    def fail(self, component: str, reason: str, message: str, *, outcome: Outcome = Outcome.INFRA_ERROR) -> None:
        """End without a score."""
        self.outcome = outcome
        self.reward = None
        self.failure = Failure(
            component=component, reason=cut(reason[:_REASON_CHARS]), message=cut(message[:_MESSAGE_CHARS])
        )

    def score(self, grade: Grade, *, ended_by_limit: bool) -> None:
        """End with what the grader found; a reward that is no finite number is the grader's error, never a zero."""
        self.metrics |= {f"reward/{cut(name)}": value for name, value in grade.components.items()}
        if grade.held or grade.reward is None or not math.isfinite(grade.reward):
            reason, _, said = (grade.failure or f"no_reward: the reward is {grade.reward}").partition(":")
            message = f"{said.strip()}\n{grade.log}".strip()
            self.fail("grader", reason, message, outcome=_unscored_outcome(grade, reason))
            return
        self.outcome = Outcome.TRUNCATED if ended_by_limit else Outcome.SCORED
        self.reward = grade.reward

    def trajectory(self, task: Task, *, rollout_id: str, session_id: str, group_id: str, index: int) -> Trajectory:
        """Return the record of the attempt."""
        nodes = self.session.nodes
        return Trajectory(
            rollout_id=rollout_id,
            session_id=session_id,
            group_id=group_id,
            task_id=task.task_id,
            index=index,
            outcome=self.outcome,
            reward=self.reward,
            nodes=nodes,
            failure=self.failure,
            harness_exit=self.exit_code,
            seconds=perf_counter() - self._started,
            timings={**self.timings, "model": sum(node.seconds for node in nodes)},
            metrics={**self.session.metrics, **self.metrics},
        )


class HarnessPlayer:
    """Plays attempts with an unchanged agent program in fresh sandboxes against the gateway."""

    def __init__(
        self,
        *,
        host: SessionHost,
        backend: EnvironmentBackend,
        grader: Grader,
        harness: HarnessSection,
        params: SamplingParams,
        identity: HarnessIdentity | None = None,
        on_record: Callable[[RolloutRecord], None] | None = None,
        ledger: Ledger = NO_LEDGER,
        watch: Callable[[Sequence[Mapping[str, object]]], str] = lambda _: "",
        unserved_s: Callable[[str], float] = lambda _: 0.0,
        overhead_s: float = 300.0,
    ) -> None:
        """The backend shows the harness's directory at `HARNESS_MOUNT`.

        An attempt that takes `overhead_s` seconds longer than its task gives the agent and the tests is cancelled.
        `unserved_s` says for how many seconds no sampler served a session: an agent that ran out of time over it is not
        scored. `watch` reads what was said, in a thread, and returns the evidence for which the attempt is held.
        `identity` goes into each record. `on_record` is called once per attempt, however it ended, on the event loop:
        it should only pass on. The ledger is told here that an attempt begins, and by whoever keeps the record that it
        ended.
        """
        self._host = host
        self._backend = backend
        self._grader = grader
        self._harness = harness
        self._params = params
        self._identity = identity or HarnessIdentity(name=harness_name(harness))
        self._on_record = on_record
        self._ledger = ledger
        self._watch = watch
        self._unserved_s = unserved_s
        self._overhead_s = overhead_s

    async def play(
        self,
        task: Task,
        *,
        group_id: str,
        index: int,
        seed: int,
        purpose: str,
        attempt: int = 0,
        min_version: int | None = None,
        exact_version: int | None = None,
    ) -> Trajectory:
        """Return how the attempt went; when cancelled, report it as such and let the cancellation through."""
        rollout_id = f"{group_id}-{index}" + (f"r{attempt}" if attempt else "")
        spec = SessionSpec(
            # Not the rollout's id alone: after a crash the same rollout is played anew, and a sampler that outlived
            # the crash must not answer with what it drew before.
            session_id=f"{rollout_id}-{secrets.token_hex(4)}",
            purpose=purpose,
            seed=seed,
            params=self._params,
            max_calls=self._harness.max_calls,
            max_session_tokens=self._harness.max_session_tokens,
            min_version=min_version,
            exact_version=exact_version,
        )
        state = _Attempt()
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._note_started(task, rollout_id, spec)
            await self._run_in_time(task, spec, state)
        except asyncio.CancelledError as error:
            cancelled = error
        except EtudeError as error:
            if state.failure is None:
                state.fail("worker", _reason(error), str(error))
            # A sandbox that fails to go away while the attempt is cancelled must not turn into a retry.
            if (current := asyncio.current_task()) is not None and current.cancelling():
                cancelled = asyncio.CancelledError(str(error))
        except Exception as error:  # noqa: BLE001 one attempt must not end a run; many in a row do, with this message
            state.fail("worker", "unexpected_error", f"{type(error).__name__}: {error}")
        if cancelled is not None:
            state.fail("worker", "cancelled", "the run was drained", outcome=Outcome.CANCELLED)
        trajectory = state.trajectory(
            task, rollout_id=rollout_id, session_id=spec.session_id, group_id=group_id, index=index
        )
        self._report(trajectory, task, state.session, purpose)
        if cancelled is not None:
            raise cancelled
        return trajectory

    async def _note_started(self, task: Task, rollout_id: str, spec: SessionSpec) -> None:
        """Have the attempt on the disk before anybody else can speak of it."""
        self._ledger.record(
            RolloutStarted(rollout=rollout_id, session=spec.session_id, task=task.task_id, purpose=spec.purpose)
        )
        await self._ledger.flush_local()

    async def _run_in_time(self, task: Task, spec: SessionSpec, state: _Attempt) -> None:
        """Play and grade, within what the task's own limits and the overhead allow together."""

        def out_of_time(message: str) -> EtudeError:
            state.fail("worker", "out_of_time", message)
            return SandboxError(message)

        limit_s = task.agent_timeout_s + task.verifier_timeout_s + self._overhead_s
        name, others = f"the end of session {spec.session_id}", "its sandbox or its grader"
        async with waiting(name, owner="player", on=others, deadline_s=limit_s, error=out_of_time):
            await self._run(task, spec, state)

    async def _run(self, task: Task, spec: SessionSpec, state: _Attempt) -> None:
        """Play the harness in a sandbox; grade what it left once that sandbox is gone."""
        with state.stage("session", "gateway"):
            key = await self._host.open(spec)
        async with AsyncExitStack() as stack:
            try:
                with state.stage("sandbox", "sandbox"):
                    manager = self._backend.create(task, model_port=self._host.port)
                    environment = await stack.enter_async_context(manager)
                with state.stage("harness", "sandbox"):
                    execution = await self._execute(environment, task, key)
                state.exit_code = execution.exit_code
            finally:
                with state.stage("session", "gateway"):
                    state.session = await self._host.close(spec.session_id)
            state.failure = _unscorable(execution, state.session) or self._outage(execution, task, spec)
            if state.failure is not None:
                return
            if evidence := await asyncio.to_thread(self._watch, state.session.all_messages):
                state.fail("grader", "held", evidence, outcome=Outcome.HELD)
                return
            with state.stage("sandbox", "sandbox"):
                change = await environment.changes(max_bytes=task.storage_mb << 20)
                await stack.aclose()
        with state.stage("grade", "grader"):
            grade = await self._grader.grade(task, change)
        state.score(grade, ended_by_limit=execution.timed_out or bool(state.session.truncated))

    def _outage(self, execution: ExecResult, task: Task, spec: SessionSpec) -> Failure | None:
        """Return a failure for an agent that had no time left because no sampler answered it."""
        unserved_s = self._unserved_s(spec.session_id)
        if not execution.timed_out or unserved_s <= _OUTAGE_SHARE * task.agent_timeout_s:
            return None
        limit_s = task.agent_timeout_s
        message = f"the agent ran out of its {limit_s:g} s, and no sampler served it for {unserved_s:.1f} s of them"
        return Failure(component="sampler", reason="outage", message=message)

    async def _execute(self, environment: Environment, task: Task, key: str) -> ExecResult:
        """Run the agent program to its end or its deadline."""
        return await environment.execute(
            harness_command(self._harness, task),
            timeout_s=task.agent_timeout_s,
            cwd=task.workdir,
            env=harness_variables(self._harness, url=environment.model_url, key=key),
        )

    def _report(self, trajectory: Trajectory, task: Task, session: SessionRecord, purpose: str) -> None:
        """Hand the attempt to whoever keeps it for people."""
        if self._on_record is None:
            return
        self._on_record(
            RolloutRecord(
                trajectory=trajectory,
                purpose=purpose,
                instruction=task.instruction,
                harness=self._identity,
                messages=session.messages,
                tools=session.tools,
                drawn_by=session.drawn_by,
                others=session.others,
                answers=session.answers,
                truncated=session.truncated,
            )
        )


def _unscorable(execution: ExecResult, session: SessionRecord) -> Failure | None:
    """Return why what the harness left says nothing about the policy, or None when it does."""
    if session.failure is not None:
        return session.failure
    if execution.exit_code == -signal.SIGKILL and not (execution.timed_out or execution.out_of_memory):
        message = "the harness was killed by neither its deadline nor the memory limit; look for what kills processes"
        return Failure(component="sandbox", reason="killed", message=message)
    if session.num_calls:
        return None
    if session.truncated == "context":
        message = "the first prompt does not fit the model's context; shorten the instruction or leave the task out"
        return Failure(component="gateway", reason="prompt_too_long", message=message)
    reason = "cannot_start" if execution.exit_code in _CANNOT_START else "no_model_call"
    tail = (execution.stderr or execution.stdout)[-_MESSAGE_CHARS:].decode("utf-8", "replace").strip()
    how = "was killed at its deadline" if execution.timed_out else f"ended with exit code {execution.exit_code}"
    message = f"the harness {how} without calling the model; check harness.command and harness.files. It said: {tail}"
    return Failure(component="harness", reason=reason, message=message)


def _unscored_outcome(grade: Grade, reason: str) -> Outcome:
    """Return how an attempt without a reward ended; the first word of a grader's failure is stable."""
    if grade.held:
        return Outcome.HELD
    return Outcome.INFRA_ERROR if reason == "sandbox" else Outcome.JUDGE_ERROR


def _blamed(error: EtudeError, component: str) -> str:
    """Return the component that an error came from."""
    if isinstance(error, SamplerError):
        return "sampler"
    return "harness" if isinstance(error, HarnessError) else component


def _reason(error: EtudeError) -> str:
    """Return an error's class as a short word to count by, such as `sandbox` for SandboxError."""
    return type(error).__name__.removesuffix("Error").lower()
