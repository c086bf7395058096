# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Waits that never end. Each test first waits in vain, for a bounded time, where the mistake was made."""

import asyncio
import json
import shutil
import socket
import sys
import threading
from contextlib import asynccontextmanager
from time import monotonic

import aiohttp
import msgspec
import openai
import pytest
from failure_kit import TOKENIZER, USER, FlatGrader, hangs, playing, request, sampler, task, until
from run_kit import gone, start

from etude.config import EnvironmentSection, RunConfig, SupervisionSection
from etude.environments.local import LocalBackend
from etude.errors import HostError, RunError, SamplerError, StoreError, VersionUnavailableError
from etude.evaluation.suite import EvalPlan, evaluate
from etude.gateway.doubles import ScriptedSampler
from etude.rewards.grader import HarborGrader
from etude.rollout.buffer import SlotBuffer, Ticket
from etude.rollout.doubles import ScriptedPlayer
from etude.rollout.group import GroupPlan, play_group
from etude.rollout.worker import RolloutWorker
from etude.runtime.fleet import sandboxes
from etude.runtime.inspection import Expected, Observation, defect
from etude.runtime.leases import LeaseBook
from etude.runtime.pulse import Pulse
from etude.runtime.services import read_controller
from etude.runtime.supervisor import Program, Supervisor
from etude.runtime.watch import watching
from etude.sampling.client import SamplerClient
from etude.sampling.doubles import FakeEngine
from etude.sampling.router import SamplerRouter
from etude.sampling.service import serving
from etude.store.local import FileStore
from etude.telemetry.events import Applied, Drawn
from etude.telemetry.waits import current_waits
from etude.types import Group, Outcome, SampleRequest, SamplingParams

SERVICE = """
import http.server, os, sys, threading
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"ready http://127.0.0.1:{server.server_port} writer", flush=True)
"""
"""A process that answers for its health while it does something else."""


@asynccontextmanager
async def supervising(tmp_path, *, ready_s=30.0, **section):
    settings = SupervisionSection(**{"heartbeat_s": 0.05, "lease_s": 0.5, "backoff_s": 0.01, **section})
    async with (
        LeaseBook(FileStore(tmp_path / "run"), lease_s=settings.lease_s) as leases,
        Supervisor(settings, leases, ready_s=ready_s) as supervisor,
    ):
        yield supervisor


def program(tmp_path, code, name="pool-0", kind="sampler"):
    command = (sys.executable, "-c", code)
    return Program(name=name, kind=kind, command=command, log=tmp_path / f"{name}.log", environment={})


SPIN = "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\nwhile True: sum(range(10**6))\n"


def spinning_task(directory, **limits):
    """A task whose tests burn a processor and sleep, and never end by themselves."""
    files = {
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/sh\nexec python3 -I -S /tests/spin.py\n",
        "tests/spin.py": SPIN,
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return msgspec.structs.replace(task("spin", **limits), path=str(directory))


def beats(directory):
    async def holds():
        return await read_controller(FileStore(directory)) is not None

    return holds


def said(notes):
    async def holds():
        return bool(notes)

    return holds


@pytest.mark.slow
@pytest.mark.row("P-1")
async def test_rewards_and_agents_that_sleep_or_spin_do_not_block_the_event_loop(tmp_path):
    """A reward that burns a processor runs in its sandbox, and blocking the loop sets an alarm."""
    alarms = []
    async with Pulse(FileStore(tmp_path / "run"), note=alarms.append) as pulse:
        await until(beats(tmp_path / "run"))
        # The mistake: the reward is a function that the loop calls.
        threading.Event().wait(1.7)
        await until(said(alarms))
        assert pulse.worst_lag() > 1.0
    assert alarms[0].startswith("the event loop stood still for")

    backend = await LocalBackend.start()
    try:
        spinning = spinning_task(tmp_path, verifier_timeout_s=1.5, agent_timeout_s=1.5)
        async with Pulse(FileStore(tmp_path / "run"), note=alarms.append) as pulse:
            async with backend.create(spinning) as sandbox:
                grading = asyncio.create_task(HarborGrader(backend).grade(spinning, {}))
                ended = await sandbox.execute(["python3", "-I", "-S", "-c", SPIN], timeout_s=1.5)
            grade = await grading
            assert pulse.worst_lag() < 1.0
    finally:
        await backend.close()
    assert ended.timed_out
    assert (grade.reward, grade.failure.partition(":")[0]) == (None, "tests_timeout")
    assert len(alarms) == 1


@pytest.mark.row("P-2")
async def test_a_sampler_that_accepts_and_never_answers_is_left_for_another():
    """A mute sampler is given up at its deadline and asked last; every request is served by the others."""
    # The kernel accepts the connection; nobody ever reads it.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as patient:
            assert await hangs(patient.post(f"{url}/sample", data=b""))

        async with (
            sampler(FakeEngine()) as healthy,
            serving(healthy) as other,
            SamplerClient(url, timeout_s=0.2, status_timeout_s=0.2) as first,
            SamplerClient(other) as second,
        ):
            router = SamplerRouter([first, second], patience_s=10)
            async with asyncio.timeout(10):
                drawn = await asyncio.gather(*(router.sample(request(f"r{n}")) for n in range(8)))
            assert {completion.pool for completion in drawn} == {"local"}
            with pytest.raises(SamplerError, match=r"no answer to /health within 0\.2 s"):
                await first.status()


@pytest.mark.row("P-2")
async def test_a_sampler_that_says_it_is_well_and_draws_nothing_is_found_out():
    """A hung engine behind a healthy server is noticed by its steps, and what it was drawing is drawn by another."""
    engine = FakeEngine(hangs_after=20)
    async with sampler(engine) as hung, sampler(FakeEngine()) as other, asyncio.timeout(20):
        router = SamplerRouter([hung, other])
        asked = asyncio.create_task(router.sample(request("r", max_tokens=100)))
        await until(running_of(hung, 1))
        # The mistake: a server that answers is taken for a sampler that works.
        assert await hangs(asyncio.shield(asked))
        (status,) = await hung.status()

        seen = Observation(now=0.0, answered_at=0.0)
        expected = Expected(sampler_id="s0", pool="local", view="fp32")
        for now in (0.0, 5.0, 11.0):
            (status,) = await hung.status()
            seen.note(status, None, now)
            reason = defect(seen, expected, None, patience_s=10.0)
            assert bool(reason) == (now > 10.0)
        assert reason == "has taken no decoding step for 10 s"
        router.quarantine(hung, reason)
        assert len((await asked).token_ids) == 100
        engine.go_on.set()


@pytest.mark.row("P-3")
async def test_nobody_waits_for_a_version_that_is_never_made():
    """A request for a version that the trainer will not make is refused in bounded time, and so is the last one."""
    published = asyncio.Event()
    assert await hangs(published.wait())

    asked = SampleRequest(
        request_id="last", session_id="last", prompt_ids=(1,), params=SamplingParams(), exact_version=4
    )
    async with sampler(FakeEngine(), version_wait_s=0.1) as served, asyncio.timeout(5):
        with pytest.raises(VersionUnavailableError, match="asks for exactly 4; this sampler holds version 3"):
            await served.sample(asked)
        router = SamplerRouter([served], patience_s=0.2)
        with pytest.raises(VersionUnavailableError):
            await router.sample(asked)
        with pytest.raises(VersionUnavailableError):
            await router.sample(msgspec.structs.replace(asked, exact_version=None, min_version=4))


@pytest.mark.slow
@pytest.mark.row("P-3")
async def test_a_run_ends_with_its_last_step_and_leaves_no_process(finished):
    """The last step ends the run, with rollouts in flight or not, and all its processes."""
    await gone(finished)
    assert (finished / "evals/6/report.json").is_file()


@pytest.mark.row("P-4")
async def test_an_evaluation_ends_without_the_episodes_that_never_do():
    """An episode beyond all its time limits is cancelled and counted; the evaluation ends with the others."""

    async def agent(chat):
        status, _ = await chat.ask(USER)
        if chat.task.task_id == "stuck":
            await asyncio.Event().wait()
        return status != 200

    class Stuck(FlatGrader):
        async def grade(self, task, change):
            if task.task_id == "ungradable":
                await asyncio.Event().wait()
            return await super().grade(task, change)

    assert await hangs(Stuck().grade(task("ungradable"), {}))

    plan = EvalPlan(attempts=2, seed=0, concurrency=4, retries=0)
    limits = {"agent_timeout_s": 0.5, "verifier_timeout_s": 0.5}
    tasks = [task(name, **limits) for name in ("fine", "stuck", "ungradable")]
    drawing = ScriptedSampler(["done"], tokenizer=TOKENIZER)
    async with playing(agent, drawing, grader=Stuck(), overhead_s=0.5) as player, asyncio.timeout(20):
        report = await evaluate(player, tasks, plan, version=0)
    passed = {result.task_id: (result.passed, result.scored) for result in report.per_task}
    # The agent's own limit ends a stuck agent; what it left is graded.
    assert passed == {"fine": (2, 2), "stuck": (2, 2), "ungradable": (0, 0)}
    assert (report.infra_failures, report.failures) == (2, {"worker/out_of_time": 2})
    assert not report.is_valid


@pytest.mark.row("P-6")
async def test_a_process_that_dies_once_too_often_ends_the_run_with_the_cause(tmp_path):
    """Beyond its budget of restarts a process ends the run, loudly: component, cause, last words."""

    async def worker():
        raise RunError("too many restarts")

    # The mistake: a task that nobody waits for. It is dead, and the loop goes on.
    background = asyncio.create_task(worker())
    assert await hangs(asyncio.Event().wait())
    assert background.done()
    assert isinstance(background.exception(), RunError)

    restarts = 2
    deaths = []
    async with supervising(tmp_path, restarts=restarts) as supervisor:
        supervisor.listen(lambda _name, _url: None, lambda _name, reason: deaths.append(reason))
        supervisor.start(program(tmp_path, SERVICE + "sys.exit('error: out of memory')"))
        with pytest.raises(RunError) as end:
            async with asyncio.timeout(30), watching([supervisor]):
                await asyncio.Event().wait()
    assert deaths == ["ended with exit code 1"] * (restarts + 1)
    message = str(end.value)
    for part in ("the sampler pool-0 ended with exit code 1", "out of memory", "2 restarts", "supervision.restarts"):
        assert part in message


LONG = {"role": "user", "content": "x" * 3000}


@pytest.mark.row("P-7")
async def test_a_prompt_that_never_fits_costs_its_group_and_no_more():
    """A task whose prompt exceeds the context is tried a bounded number of times, reported lost, and passed over."""

    async def agent(chat):
        status, _ = await chat.ask(LONG if chat.task.task_id == "t0" else USER)
        return status != 200

    drawing = ScriptedSampler(["done"], tokenizer=TOKENIZER)
    plan = GroupPlan(seed=0, size=2, min_survivors=2, retries=2)
    async with playing(agent, drawing) as player, asyncio.timeout(20):

        async def until_it_works():
            while True:
                ticket = Ticket(number=0, task_id="t0", admitted_version=0)
                played = await play_group(player, task("t0"), ticket, plan, concurrency=asyncio.Semaphore(2))
                if not played.lost:
                    return

        assert await hangs(until_it_works())

        class Tasks:
            def __init__(self):
                self.number = -1

            def next_task(self):
                self.number += 1
                return task(f"t{self.number % 3}")

        lost = []

        async def keep(_ticket, played):
            if played.lost:
                lost.append(played)

        buffer = SlotBuffer(groups_per_step=4, max_staleness=0)
        worker = RolloutWorker(
            player=player,
            buffer=buffer,
            plan=plan,
            concurrency=4,
            on_group=keep,
        )
        async with asyncio.TaskGroup() as loops:
            loops.create_task(worker.run(Tasks()))
            trained = [(await buffer.take(0)).task_id for _ in range(4)]
            worker.stop()
    assert "t0" not in trained
    assert buffer.lost == {"too_few_survivors": len(lost)}
    assert {played.group.task_id for played in lost} == {"t0"}
    assert {len(played.unscored) for played in lost} == {plan.size * (1 + plan.retries)}
    failure = lost[0].unscored[0].failure
    assert (failure.component, failure.reason) == ("gateway", "prompt_too_long")
    assert "shorten the instruction" in failure.message


def running_of(served, count):
    async def enough():
        (status,) = await served.status()
        return status.running >= count

    return enough


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    lineage: str = "l"
    digest: str = "d"
    tensors: dict = {}


async def played(buffer, steps):
    """Let a worker and a trainer meet in a buffer; samplers follow at once."""
    player = ScriptedPlayer(lambda _task, index, _attempt: (Outcome.SCORED, 1.0, 3 * index))

    class Tasks:
        def next_task(self):
            return task()

    plan = GroupPlan(seed=0, size=2, min_survivors=2, retries=0)
    worker = RolloutWorker(player=player, buffer=buffer, plan=plan, concurrency=2)
    async with asyncio.timeout(10), asyncio.TaskGroup() as loops:
        loops.create_task(worker.run(Tasks()))
        for version in range(steps):
            for _ in range(buffer.groups_per_step):
                await buffer.take(version)
            buffer.trained(version + 1)
            buffer.served(version + 1)
        worker.stop()


@pytest.mark.row("P-8")
async def test_training_and_rollouts_never_wait_for_each_other_and_each_wait_has_a_name():
    """There are slots for a whole step whatever the shape; waits have names and ends."""
    place, batch = asyncio.Queue(maxsize=1), asyncio.Event()

    async def sample_two():
        await place.put("one")
        await place.put("two")
        batch.set()

    # The mistake: the queue is full before there are the two groups that the trainer takes at once.
    assert await hangs(asyncio.gather(sample_two(), batch.wait()))

    for groups_per_step, max_staleness in ((1, 0), (3, 0), (2, 2)):
        await played(SlotBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness), steps=4)

    # Now a sampler that never takes over new weights: slots stay taken, and nothing new is played.
    buffer = SlotBuffer(groups_per_step=1, max_staleness=0, stall_s=0.5)
    ticket = buffer.admit("t")
    buffer.finish(ticket, Group(group_id=ticket.group_id, task_id="t", ticket=0, admitted_version=0, trajectories=()))
    await buffer.take(0)
    buffer.trained(1)
    admitting, training = asyncio.create_task(buffer.wait_for_slot()), asyncio.create_task(buffer.take(1))
    await asyncio.sleep(0)
    graph = {wait.owner: (wait.name, wait.on) for wait in current_waits()}
    assert graph == {
        "admit": ("a free slot", "the trainer, or samplers that do not follow it,"),
        "train": ("a group for the step to version 2", "0 groups in flight"),
    }
    for stuck, words in ((admitting, r"admit waited 0\.5 s for a free slot"), (training, r"train waited 0\.5 s")):
        with pytest.raises(RunError, match=words):
            await stuck


class Pausing:
    """The mistake: an update waits until nothing runs, while what waits is let in."""

    def __init__(self):
        self.running, self.idle = 0, asyncio.Event()

    async def sample(self):
        self.running += 1
        await asyncio.sleep(0.02)
        self.running -= 1
        if not self.running:
            self.idle.set()

    async def sample_again_and_again(self, delay):
        await asyncio.sleep(delay)
        while True:
            await self.sample()

    async def update(self):
        async with asyncio.TaskGroup() as load:
            busy = [load.create_task(self.sample_again_and_again(delay)) for delay in (0.0, 0.01)]
            await self.idle.wait()
            for one in busy:
                one.cancel()


@pytest.mark.row("P-10")
async def test_weights_are_swapped_while_requests_run_and_new_ones_arrive():
    """A swap waits for nobody who may go on across it, and a bounded time for the others; nothing has to be paused."""

    assert await hangs(Pausing().update())

    engine = FakeEngine(step_s=0.002)
    async with sampler(engine, swap_hold_s=0.3) as served, asyncio.timeout(20), asyncio.TaskGroup() as load:
        stop = asyncio.Event()

        async def draw(name):
            number = 0
            while not stop.is_set():
                number += 1
                await served.sample(request(f"{name}-{number}", max_tokens=30))

        for name in "abcd":
            load.create_task(draw(name))
        exact = msgspec.structs.replace(request("exact", max_tokens=10_000), exact_version=3)
        pinned = load.create_task(_refused(served.sample(exact)))
        await until(running_of(served, 5))
        for version in (4, 5, 6):
            started = monotonic()
            await served.stage(Weights(version=version))
            assert monotonic() - started < 2.0
            assert (await served.sample(request(f"after {version}", max_tokens=5))).versions[0].version == version
        assert "was kept for 0.3 s" in await pinned
        stop.set()


async def _refused(sampling):
    """Return why a sampler gave a request up."""
    with pytest.raises(VersionUnavailableError) as refusal:
        await sampling
    return str(refusal.value)


class BreaksAtSwap(FakeEngine):
    """Fails between the last step under the old weights and the first under the new ones."""

    def stage(self, tensors):
        def commit():
            raise MemoryError("no room for the new weights")

        return commit


@pytest.mark.row("P-11")
async def test_an_engine_that_fails_in_a_swap_is_replaced_and_nobody_waits_for_it():
    """An engine that fails in a swap fails at once instead of staying paused, and others serve its requests."""

    class Paused:
        """The mistake: resume is not called when the update fails."""

        def __init__(self):
            self.running = asyncio.Event()
            self.running.set()

        async def update(self):
            self.running.clear()
            raise MemoryError

        async def sample(self):
            await self.running.wait()

    paused = Paused()
    with pytest.raises(MemoryError):
        await paused.update()
    assert await hangs(paused.sample())

    async with sampler(BreaksAtSwap(step_s=0.002)) as broken, sampler(FakeEngine()) as other, asyncio.timeout(10):
        router = SamplerRouter([broken, other])
        running = [asyncio.create_task(router.sample(request(f"r{n}", max_tokens=200))) for n in range(4)]
        await until(running_of(broken, 1))
        with pytest.raises(SamplerError, match="no room for the new weights"):
            await broken.stage(Weights(version=4))
        assert all(len(completion.token_ids) == 200 for completion in await asyncio.gather(*running))
        # The process ends with this, and its supervisor starts it anew.
        with pytest.raises(SamplerError, match="the engine failed: MemoryError"):
            await broken.watch()
        with pytest.raises(SamplerError):
            await broken.sample(request("late"))


@pytest.mark.slow
@pytest.mark.row("P-13")
def test_samplers_are_told_the_version_before_anything_is_drawn(disturbed):
    """A resumed run publishes its version before it asks for a rollout, so no sampler waits for a batch of its own."""

    # The mistake: engines wait for weights, which come of a batch, which comes of the engines.
    async def resume():
        weights, batch = asyncio.Event(), asyncio.Event()

        async def engines():
            await weights.wait()
            batch.set()

        async def trainer():
            await batch.wait()
            weights.set()

        await asyncio.gather(engines(), trainer())

    assert asyncio.run(hangs(resume()))

    assert len(disturbed.sampler_lives) > disturbed.kills
    drew = 0
    for facts in disturbed.sampler_lives:
        kinds = [type(fact) for fact in facts if isinstance(fact, Applied | Drawn)]
        assert not kinds or kinds[0] is Applied
        drew += Drawn in kinds
    assert drew > 0


@pytest.mark.row("P-14")
async def test_a_request_beyond_the_context_is_answered_at_once_in_the_providers_words():
    """A prompt that is too long is refused at once with the error that provider SDKs know, and never retried."""
    arrived = asyncio.Queue()
    # The mistake: an engine that keeps it in its queue until there is room, which there never is.
    assert await hangs(arrived.get())

    caught = []

    async def agent(chat):
        async with openai.AsyncOpenAI(base_url=chat.url, api_key=chat.key, max_retries=5) as client:
            started = monotonic()
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.chat.completions.create(model="m", messages=[LONG])
            caught.append((refusal.value.code, refusal.value.message, monotonic() - started))
            await client.chat.completions.create(model="m", messages=[USER])

    async with playing(agent, ScriptedSampler(["done"], tokenizer=TOKENIZER)) as player, asyncio.timeout(20):
        trajectory = await player.play(task(), group_id="g000000", index=0, seed=0, purpose="train")
    ((code, message, seconds),) = caught
    assert code == "context_length_exceeded"
    assert "maximum context length is 2000 tokens" in message
    assert seconds < 2.0
    assert trajectory.outcome is Outcome.SCORED


@pytest.mark.slow
@pytest.mark.row("P-15")
async def test_a_run_in_which_every_attempt_fails_says_that_there_is_nothing_to_learn(coin, tmp_path):
    """Rewards that are all equal end the run after five steps with a diagnosis, instead of being sampled for ever."""
    failing = ScriptedPlayer(lambda _task, _index, _attempt: (Outcome.SCORED, 0.0, 1))

    async def until_rewards_differ():
        while True:
            played = await asyncio.gather(
                *(failing.play(task(), group_id="g", index=n, seed=n, purpose="train") for n in range(4))
            )
            if len({trajectory.reward for trajectory in played}) > 1:
                return

    assert await hangs(until_rewards_differ())

    run = tmp_path / "run"
    tasks = tasks_with_reward(0, coin, tmp_path)
    command = await start("train", coin, run, f"tasks.train={tasks}", "trainer.steps=9", "rollout.group_size=2")
    assert await command.end() == 1
    assert command.steps == [1, 2, 3, 4, 5]
    assert "all attempts at a task got the same reward (mean 0), so there is nothing to learn from" in command.errors
    assert f"etude show {run}" in command.errors
    await gone(run)


@pytest.mark.slow
@pytest.mark.row("P-15")
async def test_a_run_whose_tasks_are_all_solved_ends_well_before_its_last_step(coin, tmp_path):
    """If every reward is the best there is, the run saves and evaluates what it has, and ends without an error."""
    run = tmp_path / "run"
    tasks = tasks_with_reward(1, coin, tmp_path)
    command = await start("run", coin, run, f"tasks.train={tasks}", "trainer.steps=9", "rollout.group_size=2")
    assert await command.end() == 0, command.errors
    assert command.steps == [1, 2, 3, 4, 5]
    assert "the tasks are solved, so training ends at step 5 of 9" in command.notes
    assert (run / "checkpoints/000005").is_dir()
    summary = json.loads((run / "summary.json").read_text())
    assert list(summary["stages"]) == ["eval_before", "train", "eval_after"]
    assert summary["eval"]["after"]["version"] == 5
    await gone(run)


def tasks_with_reward(reward, coin, tmp_path):
    """Return a directory of tasks at which every attempt gets this reward."""
    tasks = tmp_path / "tasks"
    shutil.copytree(coin.parent / "tasks/train", tasks)
    for test in tasks.glob("*/tests/test.sh"):
        test.write_text(f"#!/bin/sh\necho {reward} > /logs/verifier/reward.txt\n")
    return tasks


SILENT = "import sys; print('loading the model', file=sys.stderr, flush=True); sys.stdin.read()"


@pytest.mark.row("P-16")
async def test_a_start_that_does_not_succeed_names_what_is_not_ready(tmp_path):
    """Trainer, sampler, sandboxes, store: whichever is not ready is named, with the reason, in bounded time."""
    ready = {"trainer": asyncio.Event(), "sampler": asyncio.Event()}
    # The mistake: to wait for all of them at once, without a word.
    assert await hangs(asyncio.gather(*(event.wait() for event in ready.values())))

    for name, kind, label in (("trainer", "trainer", "the trainer"), ("pool-0", "sampler", "the sampler pool-0")):
        async with supervising(tmp_path, ready_s=0.5, restarts=0) as supervisor:
            supervisor.start(program(tmp_path, SILENT, name, kind))
            with pytest.raises(RunError) as late:
                await supervisor.up(name, owner="start", deadline_s=20)
        assert str(late.value).startswith(f"{label} did not come up within 0.5 s. It said: loading the model")

    environment = EnvironmentSection(require=("gpu",))
    with pytest.raises(HostError, match=r"sandboxes on this host are not gpu, which environment\.require asks for"):
        async with sandboxes(RunConfig(environment=environment)):
            pass

    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    with pytest.raises(StoreError, match=r"cannot use .*file/run as a run directory"):
        FileStore(occupied / "run")
