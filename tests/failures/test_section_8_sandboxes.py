# pyright: basic, reportOptionalMemberAccess=false
"""Sandboxes that outlive their owner, die under it, or promise what they do not keep."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import pytest_asyncio
from failure_kit import FlatGrader, task
from msgspec.structs import replace
from sandbox_kit import fresh_nap, naps, owner, runs, until

from etude.algorithm.advantages import centred
from etude.config import EnvironmentSection, HarnessSection, RunConfig
from etude.environments.doubles import FlakyBackend
from etude.environments.image import read_image
from etude.environments.lease import leases
from etude.environments.local import LocalBackend
from etude.environments.reaping import gone, reap
from etude.errors import HostError, SandboxError, TaskError
from etude.interfaces import Capabilities, ExecResult, Grade, SessionRecord
from etude.rewards.grader import HarborGrader
from etude.rewards.screens import digs_for_the_solution
from etude.rollout.buffer import Ticket
from etude.rollout.doubles import ScriptedBackend, ScriptedHost
from etude.rollout.group import GroupPlan, play_group
from etude.rollout.player import HarnessPlayer
from etude.runtime.fleet import sandboxes
from etude.runtime.step_metrics import of_groups
from etude.store.ledger_reader import read_writer, writers
from etude.store.opening import open_store
from etude.telemetry.events import SandboxCreated, SandboxDestroyed
from etude.types import Outcome, SamplingParams, Task

pytestmark = pytest.mark.asyncio(loop_scope="module")

PASSES = "#!/bin/sh\ngrep -q right /app/answer.txt && echo 1 > /logs/verifier/reward.txt\n"
"""Leaves no reward at all for what is not right: a zero can only be somebody's invention."""

CALLED = SessionRecord(nodes=(), messages=(), num_calls=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend():
    started = await LocalBackend.start()
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def contained(backend):
    if not (backend.capabilities.network_isolated and backend.capabilities.user_isolated):
        pytest.skip("; ".join(backend.limitations))
    return backend


def write_task(directory, *, test=PASSES, files=None) -> Task:
    for name, text in {
        "environment/Dockerfile": "FROM any\nWORKDIR /app\nCOPY app /app\n",
        "tests/test.sh": test,
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    for name, text in (files or {"readme": "x"}).items():
        (directory / "environment/app" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "environment/app" / name).write_text(text)
    return replace(task(), path=str(directory), digest=str(directory))


def player(backend, *, grader=None, record=CALLED, script="echo right > answer.txt", **options) -> HarnessPlayer:
    return HarnessPlayer(
        host=ScriptedHost(record),
        backend=backend,
        grader=grader or HarborGrader(backend),
        harness=HarnessSection(command=("/bin/sh", "-c", script)),
        params=SamplingParams(),
        **options,
    )


async def played(player, some_task, *, retries, size=8, number=0, concurrency=4):
    ticket = Ticket(number=number, task_id=some_task.task_id, admitted_version=0)
    plan = GroupPlan(seed=1, size=size, min_survivors=2, retries=retries)
    return await play_group(player, some_task, ticket, plan, concurrency=asyncio.Semaphore(concurrency))


def rewards_of(group) -> list:
    return [trajectory.reward for trajectory in group.group.trajectories]


CARELESS = """
import subprocess, sys, time
boxes = [subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)]
print("up", flush=True)
time.sleep(1000)
"""
"""The mistake: a process in a session of its own, which only its dead parent knows and would have ended."""


async def orphan(directory) -> int:
    """Return a process that a careless launcher left when it was killed."""
    nap = fresh_nap()
    directory.mkdir()
    launcher = subprocess.Popen([sys.executable, "-c", CARELESS, nap], stdout=subprocess.PIPE, cwd=directory)  # noqa: ASYNC220
    await asyncio.to_thread(launcher.stdout.readline)
    launcher.kill()
    await asyncio.to_thread(launcher.wait)
    launcher.stdout.close()
    (left,) = naps(nap)
    return left


@pytest.mark.row("P-73")
async def test_nothing_outlives_an_owner_and_no_living_owner_loses_anything(tmp_path):
    """After kill -9 of owner and launcher all is gone within seconds, and a living run's sandboxes are untouched."""
    left = await orphan(tmp_path / "careless")
    alive = await owner(write_task(tmp_path / "a"), run=tmp_path / "alive")
    # The other mistake: to end what has lived for long, for it cannot be told from what is in use.
    aged = [pid for pid in (left, *naps(alive.nap)) if runs(pid)]
    assert len(aged) == 3
    os.kill(left, signal.SIGKILL)

    try:
        for kills in (("process",), ("launcher", "process")):
            dead = await owner(write_task(tmp_path / "-".join(kills)), run=tmp_path / "dead")
            for part in kills:
                os.kill(getattr(dead, part).pid if part == "process" else dead.launcher, signal.SIGKILL)
            began = time.monotonic()
            await dead.process.wait()
            await asyncio.to_thread(reap)
            await until(lambda nap=dead.nap: not naps(nap), seconds=10)
            assert time.monotonic() - began < 10
            assert not runs(dead.first)
            assert not runs(dead.launcher)
            assert dead.backend not in {lease.backend for lease, _ in leases()}
            assert not [path for path, folders, _ in os.walk("/sys/fs/cgroup") if dead.backend in "".join(folders)]
            assert len(naps(alive.nap)) == 2
    finally:
        await alive.kill()
    await asyncio.to_thread(reap)
    await until(lambda: not naps(alive.nap))


@pytest.mark.row("P-75")
async def test_every_sandbox_is_on_the_disk_before_it_exists(tmp_path):
    """A controller that is killed leaves the names of all its sandboxes, and its successor accounts for each."""

    left = await orphan(tmp_path / "careless")
    assert list((tmp_path / "careless").iterdir()) == []  # all that a successor can ask
    assert runs(left)
    os.kill(left, signal.SIGKILL)

    killed = await owner(write_task(tmp_path / "task"), run=tmp_path / "run")
    await killed.kill()
    store = open_store(str(tmp_path / "run"))
    created, destroyed = set(), set()
    for writer in await writers(store):
        async for batch in read_writer(store, writer, run_id="run"):
            created |= {fact.sandbox for fact in batch if isinstance(fact, SandboxCreated)}
            destroyed |= {fact.sandbox for fact in batch if isinstance(fact, SandboxDestroyed)}
    open_names = created - destroyed
    assert killed.sandbox in open_names
    assert await asyncio.to_thread(gone, open_names) == open_names
    assert not naps(killed.nap)


class Zeroing:
    """The mistake: an attempt that infrastructure failed has a reward of zero."""

    def __init__(self, player):
        self.player = player

    async def play(self, *args, **options):
        trajectory = await self.player.play(*args, **options)
        if trajectory.reward is None:
            return replace(trajectory, outcome=Outcome.SCORED, reward=0.0)
        return trajectory


@pytest.mark.row("P-76")
async def test_sandboxes_that_die_are_neither_zeros_nor_part_of_the_mean(contained, tmp_path):
    """With one sandbox of ten killed, every reward is the one the work earned, and the failures are counted."""
    solved = write_task(tmp_path)
    flaky = FlakyBackend(contained, probability=0.1, seed=5, within_s=0.0)
    groups = [await played(Zeroing(player(flaky)), solved, retries=0, number=number) for number in range(2)]
    zeroed = [reward for group in groups for reward in rewards_of(group)]
    assert flaky.num_killed > 0
    assert 0.0 in zeroed
    # Where every attempt was equally good, some are now to be repeated and others to be avoided.
    assert any(set(centred(rewards_of(group), group_size=8)) != {0.0} for group in groups)

    flaky = FlakyBackend(contained, probability=0.1, seed=5, within_s=0.0)
    groups = [await played(player(flaky), solved, retries=3, number=number) for number in range(4)]
    assert flaky.num_killed > 0
    assert [rewards_of(group) for group in groups] == [[1.0] * 8] * 4
    failed = [trajectory for group in groups for trajectory in group.unscored]
    assert {(trajectory.outcome, trajectory.reward) for trajectory in failed} == {(Outcome.INFRA_ERROR, None)}
    assert len(failed) == flaky.num_killed
    assert of_groups(groups)["rollout/infra_errors_count"] == len(failed)


@pytest.mark.row("P-76")
async def test_a_harness_that_somebody_killed_is_no_attempt(contained, tmp_path):
    """A harness that is killed from outside is a failure of infrastructure, also where its sandbox lives on."""
    some, nap = write_task(tmp_path), fresh_nap()
    harness = player(contained, script=f"exec sleep {nap}")
    playing = asyncio.create_task(harness.play(some, group_id="g", index=0, seed=1, purpose="train"))
    await until(lambda: naps(nap))
    os.kill(naps(nap)[0], signal.SIGKILL)
    trajectory = await playing
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRA_ERROR, None)
    assert (trajectory.failure.component, trajectory.failure.reason) == ("sandbox", "killed")


@pytest.mark.row("P-77")
@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 1", "no_reward"),
        ("kill -9 $$", "sandbox"),
        ("sleep 60", "tests_timeout"),
        ("echo nan > /logs/verifier/reward.txt", "bad_reward"),
    ],
)
async def test_a_grader_that_fails_says_so_and_no_number(contained, tmp_path, test, reason):
    """Whatever becomes of the tests, there is a reward that they wrote or a named failure, never an invented zero."""

    class OneNumber:
        """The mistake: the grader's answer has no place for its own failure."""

        async def grade(self, *args):
            return Grade(reward=(await HarborGrader(contained).grade(*args)).reward or 0.0)

    some = replace(write_task(tmp_path, test=f"#!/bin/sh\n{test}\n"), verifier_timeout_s=1.0)
    options = {"group_id": "g", "index": 0, "seed": 1, "purpose": "train"}
    wrong = await player(contained, grader=OneNumber()).play(some, **options)
    assert (wrong.outcome, wrong.reward) == (Outcome.SCORED, 0.0)

    right = await player(contained).play(some, **options)
    assert right.outcome in (Outcome.JUDGE_ERROR, Outcome.INFRA_ERROR)
    assert (right.reward, right.failure.component, right.failure.reason) == (None, "grader", reason)
    assert {"scored", "infra_error", "judge_error", "truncated", "held"} <= {outcome.value for outcome in Outcome}


@pytest.mark.row("P-79")
async def test_sandboxes_that_die_together_while_they_grade_are_graded_again(tmp_path):
    """When the launcher takes all grading sandboxes with it, a new one is started and every attempt gets its reward."""
    nap = f"1.{fresh_nap()}"
    slow = write_task(tmp_path, test=f"#!/bin/sh\nsleep {nap}\n" + PASSES)

    async def disturbed(retries):
        backend = await LocalBackend.start()
        try:
            first = backend.process_id
            playing = asyncio.create_task(played(player(backend), slow, retries=retries, size=4))
            await until(lambda: len(naps(nap)) == 4)
            os.kill(first, signal.SIGKILL)
            return await playing
        finally:
            await backend.close()

    lost = await disturbed(retries=0)
    assert lost.lost == "too_few_survivors"
    assert [trajectory.failure.component for trajectory in lost.unscored] == ["grader"] * 4

    kept = await disturbed(retries=1)
    assert rewards_of(kept) == [1.0] * 4
    assert [trajectory.outcome for trajectory in kept.unscored] == [Outcome.INFRA_ERROR] * 4


REACHES = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2)"


@pytest.mark.row("P-81")
async def test_what_is_promised_about_the_network_was_tried_from_inside(contained, tmp_path):
    """Isolation is what a probe in a sandbox found, never what a backend says of itself; without it no run starts."""

    class Says(LocalBackend):
        """The mistake: capabilities are a declaration."""

        @property
        def capabilities(self):
            return Capabilities(network_isolated=True)

    some = write_task(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = str(host.getsockname()[1])
        weak = await Says.start(namespaces=False)
        try:
            assert weak.capabilities.network_isolated
            async with weak.create(some) as environment:
                assert (await environment.execute(["python3", "-c", REACHES, port], timeout_s=10)).exit_code == 0
            assert "network_isolated: commands reach this host's network" in weak.limitations
        finally:
            await weak.close()
        async with contained.create(some) as environment:
            assert (await environment.execute(["python3", "-c", REACHES, port], timeout_s=10)).exit_code
    honest = await LocalBackend.start(namespaces=False)
    await honest.close()
    assert not honest.capabilities.network_isolated
    unmet = RunConfig(environment=EnvironmentSection(require=("egress_enforced",)))
    with pytest.raises(HostError, match="not egress_enforced, which"):
        await sandboxes(unmet).__aenter__()


def call(command) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "shell", "arguments": f'{{"command": "{command}"}}'}}],
    }


@pytest.mark.row("P-82")
async def test_history_is_not_in_the_sandbox_and_who_looks_for_it_is_held(contained, tmp_path):
    """No repository's history gets into a sandbox, and an attempt that searches for the solution there is held."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "environment/app")]
    some = write_task(tmp_path)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "fix: the solution"]):
        subprocess.run([*git, *command], check=True)  # noqa: ASYNC221
    # The mistake: to take the directory as it is.
    assert b"the solution" in subprocess.run([*git, "log", "--all"], check=True, capture_output=True).stdout  # noqa: ASYNC221

    assert not [file.path for file in read_image(some).files if ".git" in file.path]
    async with contained.create(some) as environment:
        looked = await environment.execute(["find", "/app", "/root", "/home", "-name", ".git*"], timeout_s=10)
        assert looked.stdout == b""
    (tmp_path / "environment/Dockerfile").write_text("FROM any\nCOPY app/.git /app/.git\n")
    with pytest.raises(TaskError, match="is a repository's history"):
        read_image(some)

    digging = [
        "git log --all -S fix",
        "git show 1a2b3c4d",
        "cd x && git -C . reflog",
        "curl https://github.com/a/b.patch",
    ]
    for command in digging:
        record = replace(CALLED, messages=(call("ls"), call(command)))
        backend = ScriptedBackend(ExecResult(exit_code=0, stdout=b"", stderr=b""))
        watched = player(backend, record=record, watch=digs_for_the_solution, grader=FlatGrader())
        trajectory = await watched.play(some, group_id="g", index=0, seed=1, purpose="train")
        assert (trajectory.outcome, trajectory.reward) == (Outcome.HELD, None), command
        assert trajectory.failure.message.startswith("message 1.0")
    harmless = [
        call("git status"),
        call("git log --oneline"),
        call("pytest -k github"),
        {"tool_calls": [1, {"function": 2}]},
    ]
    assert digs_for_the_solution(harmless) == ""


@pytest.mark.row("P-83")
async def test_what_a_backend_cannot_do_is_refused_before_anything_runs():
    """A run that needs what its backend cannot do, such as forks, does not start, and says what is missing."""

    class Promises(ScriptedBackend):
        """The mistake: every provider is taken to be able to do everything."""

        async def fork(self):
            raise SandboxError("paused sandboxes cannot be forked")

    with pytest.raises(SandboxError, match="cannot be forked"):  # hours later
        await Promises(None).fork()

    needed = ("fork", "snapshot", "memory_snapshot", "gpu", "telepathy")
    wanted = RunConfig(environment=EnvironmentSection(require=(*needed, "process_isolated")))
    with pytest.raises(HostError, match=f"not {', '.join(needed)}, which"):
        await sandboxes(wanted).__aenter__()
