"""Promises of the harness player."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest

from etude.config import HarnessSection
from etude.errors import EtudeError, HarnessError, SamplerError, SandboxError
from etude.interfaces import Environment, ExecResult, Grade, SessionRecord
from etude.rollout.doubles import ScriptedBackend, ScriptedGrader, ScriptedHost
from etude.rollout.player import HarnessPlayer
from etude.rollout.record import RolloutRecord
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import RolloutStarted
from etude.types import Failure, Outcome, SamplingParams, Task, Trajectory

TASK = Task(task_id="t", path="/tasks/t", digest="d", instruction="fix it; $(now)")
HARNESS = HarnessSection(
    command=("python3", "/opt/harness/mini.py", "{instruction}"),
    env={"OPENAI_API_KEY": "not the session's", "LANG": "C"},
    max_calls=5,
    max_session_tokens=100,
)
ENDED = ExecResult(exit_code=0, stdout=b"", stderr=b"")
CALLED = SessionRecord(nodes=(), messages=(), num_calls=3, metrics={"branches": 1.0})


class Stage:
    """A player with everything around it scripted."""

    def __init__(
        self,
        *,
        result: ExecResult | EtudeError | None = ENDED,
        record: SessionRecord = CALLED,
        grade: Grade | EtudeError = Grade(reward=1.0, components={"tests": 0.5}),  # noqa: B008
        open_error: EtudeError | None = None,
        create_error: EtudeError | None = None,
        destroy_error: EtudeError | None = None,
        unserved_s: float = 0.0,
        watch: Callable[[Sequence[Mapping[str, object]]], str] = lambda _: "",
    ) -> None:
        self.host = ScriptedHost(record, open_error=open_error)
        self.backend = ScriptedBackend(
            result, change={"a.py": b"new"}, create_error=create_error, destroy_error=destroy_error
        )
        self.grader = ScriptedGrader(grade)
        self.records: list[RolloutRecord] = []
        self.player = HarnessPlayer(
            host=self.host,
            backend=self.backend,
            grader=self.grader,
            harness=HARNESS,
            params=SamplingParams(),
            on_record=self.records.append,
            unserved_s=lambda _: unserved_s,
            watch=watch,
        )

    async def play(self) -> Trajectory:
        return await self.player.play(TASK, group_id="g000001", index=2, seed=11, purpose="train", min_version=4)


async def test_the_harness_gets_the_instruction_the_model_and_nothing_else():
    stage = Stage()
    trajectory = await stage.play()
    command, env = stage.backend.environment.commands[0]
    session_id = stage.host.opened[0].session_id
    assert command == ("python3", "/opt/harness/mini.py", "fix it; $(now)")
    assert env == {
        "LANG": "C",
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": f"key of {session_id}",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": f"key of {session_id}",
    }
    assert (stage.host.opened[0].max_calls, stage.host.opened[0].max_session_tokens) == (5, 100)
    assert stage.host.opened[0].min_version == 4
    assert stage.host.opened[0].seed == 11
    assert trajectory.rollout_id == "g000001-2"


async def test_a_harness_that_ends_by_itself_is_scored_on_its_change_alone():
    stage = Stage()
    trajectory = await stage.play()
    assert (trajectory.outcome, trajectory.reward, trajectory.failure) == (Outcome.SCORED, 1.0, None)
    assert stage.grader.changes == [{"a.py": b"new"}]
    assert stage.backend.num_alive == 0
    assert stage.host.closed == [stage.host.opened[0].session_id]
    assert {"sandbox", "harness", "grade", "model"} <= set(trajectory.timings)
    assert trajectory.metrics == {"branches": 1.0, "reward/tests": 0.5}
    assert [record.trajectory for record in stage.records] == [trajectory]


@pytest.mark.parametrize(
    ("result", "record"),
    [
        (ExecResult(exit_code=-9, stdout=b"", stderr=b"", timed_out=True), CALLED),
        (ENDED, SessionRecord(nodes=(), messages=(), num_calls=5, truncated="calls")),
    ],
)
async def test_what_a_budget_ended_is_graded_and_called_truncated(result: ExecResult, record: SessionRecord):
    trajectory = await Stage(result=result, record=record).play()
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED, 1.0)


async def test_time_that_an_outage_took_from_the_agent_is_no_fault_of_the_policy():
    late = ExecResult(exit_code=-9, stdout=b"", stderr=b"", timed_out=True)
    robbed = await Stage(result=late, unserved_s=0.1 * TASK.agent_timeout_s).play()
    assert (robbed.outcome, robbed.reward) == (Outcome.INFRA_ERROR, None)
    assert robbed.failure
    assert (robbed.failure.component, robbed.failure.reason) == ("sampler", "outage")
    assert (await Stage(result=late, unserved_s=0.01 * TASK.agent_timeout_s).play()).outcome is Outcome.TRUNCATED
    assert (await Stage(unserved_s=0.5 * TASK.agent_timeout_s).play()).outcome is Outcome.SCORED


@pytest.mark.parametrize(
    ("stage", "component", "reason"),
    [
        (Stage(open_error=SandboxError("no port")), "gateway", "sandbox"),
        (Stage(create_error=SandboxError("no space")), "sandbox", "sandbox"),
        (Stage(create_error=HarnessError("not here")), "harness", "harness"),
        (Stage(result=SandboxError("died")), "sandbox", "sandbox"),
        (Stage(destroy_error=SandboxError("stuck")), "sandbox", "sandbox"),
        (Stage(result=SandboxError("died"), destroy_error=SandboxError("stuck")), "sandbox", "sandbox"),
        (Stage(result=ExecResult(exit_code=-9, stdout=b"", stderr=b"")), "sandbox", "killed"),
        (Stage(grade=SandboxError("no space")), "grader", "sandbox"),
        (Stage(grade=SamplerError("judge's sampler")), "sampler", "sampler"),
        (Stage(result=ExecResult(exit_code=127, stdout=b"", stderr=b"not found"), record=SessionRecord(
            nodes=(), messages=())), "harness", "cannot_start"),
        (Stage(record=SessionRecord(nodes=(), messages=())), "harness", "no_model_call"),
        (Stage(record=SessionRecord(nodes=(), messages=(), num_calls=2, failure=Failure(
            component="sampler", reason="timeout"))), "sampler", "timeout"),
    ],
)  # fmt: skip
async def test_failures_of_infrastructure_are_named_and_never_scored(stage: Stage, component: str, reason: str):
    trajectory = await stage.play()
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRA_ERROR, None)
    assert trajectory.failure is not None
    assert (trajectory.failure.component, trajectory.failure.reason) == (component, reason)
    assert stage.backend.num_alive == 0
    assert len(stage.host.closed) == len(stage.host.opened)
    assert len(stage.records) == 1


@pytest.mark.parametrize(
    ("grade", "outcome", "reason"),
    [
        (Grade(reward=None, failure="tests_timeout: killed after 5 s"), Outcome.JUDGE_ERROR, "tests_timeout"),
        (Grade(reward=float("nan")), Outcome.JUDGE_ERROR, "no_reward"),
        (Grade(reward=None, failure="sandbox: no space"), Outcome.INFRA_ERROR, "sandbox"),
        (Grade(reward=None, failure="held: conftest.py", held=True), Outcome.HELD, "held"),
        (Grade(reward=1.0, failure="held: conftest.py", held=True), Outcome.HELD, "held"),
    ],
)
async def test_what_the_grader_could_not_score_has_no_reward_and_a_reason(grade: Grade, outcome: Outcome, reason: str):
    trajectory = await Stage(grade=grade).play()
    assert (trajectory.outcome, trajectory.reward) == (outcome, None)
    assert trajectory.failure is not None
    assert (trajectory.failure.component, trajectory.failure.reason) == ("grader", reason)


async def test_a_trajectory_can_be_sent_whatever_the_grader_read():
    grade = Grade(reward=None, failure="\ud800", log="x" * 10**6, components={"\ud800": 1.0})
    trajectory = await Stage(grade=grade).play()
    assert len(msgspec.msgpack.encode(trajectory)) < 10_000


@pytest.mark.parametrize("destroy_error", [None, SandboxError("stuck")])
async def test_a_cancelled_attempt_is_reported_and_leaves_nothing_behind(destroy_error: SandboxError | None):
    stage = Stage(result=None, destroy_error=destroy_error)
    playing = asyncio.create_task(stage.play())
    await stage.backend.environment.started.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert stage.records[0].trajectory.outcome is Outcome.CANCELLED
    assert stage.backend.num_alive == 0
    assert len(stage.host.closed) == 1


async def test_each_play_is_a_session_of_its_own():
    stage = Stage()
    await stage.play()
    await stage.play()
    assert len({spec.session_id for spec in stage.host.opened}) == 2


async def test_an_attempt_is_on_the_disk_before_its_sandbox_and_its_session_is_in_its_record():
    seen: list[str] = []

    class Ledger(MemoryLedger):
        async def flush_local(self) -> None:
            seen.append("flushed")

    class Backend(ScriptedBackend):
        def create(self, task: Task, *, model_port: int | None = None) -> AbstractAsyncContextManager[Environment]:
            seen.append("sandbox")
            return super().create(task, model_port=model_port)

    ledger = Ledger()
    host = ScriptedHost(CALLED)
    player = HarnessPlayer(
        host=host,
        backend=Backend(ENDED),
        grader=ScriptedGrader(Grade(reward=1.0)),
        harness=HARNESS,
        params=SamplingParams(),
        ledger=ledger,
    )
    trajectory = await player.play(TASK, group_id="g000001", index=2, seed=11, purpose="eval", attempt=1)
    [spec] = host.opened
    assert ledger.events == [RolloutStarted(rollout="g000001-2r1", session=spec.session_id, task="t", purpose="eval")]
    assert seen == ["flushed", "sandbox"]
    assert trajectory.session_id == spec.session_id


async def test_an_attempt_is_held_for_what_any_of_its_agents_said():
    said: dict[str, object] = {"role": "assistant", "content": "git log --all"}
    record = SessionRecord(nodes=(), messages=(), num_calls=3, answers={4: said})
    stage = Stage(record=record, watch=lambda messages: "it digs" if said in messages else "")
    trajectory = await stage.play()
    assert (trajectory.outcome, trajectory.reward) == (Outcome.HELD, None)
