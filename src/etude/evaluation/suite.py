"""The held-out tasks, played at one policy version through the same player that training uses."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec

from etude.errors import ConfigError
from etude.evaluation.statistics import Tally, clustered_interval, mean_pass_at_k, pass_rate
from etude.interfaces import RolloutPlayer
from etude.types import WITH_REWARD, Outcome, Task, Trajectory

MAX_INFRA_SHARE = 0.05
"""A report with more failures of infrastructure than this is not to be trusted."""


class EvalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a suite is played."""

    attempts: int
    """Per task."""
    seed: int
    concurrency: int
    """Attempts alive at once."""
    retries: int = 1
    """Attempts again after an infrastructure failure."""
    pass_reward: float = 1.0
    """An attempt passes with this reward or more."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one task."""

    task_id: str
    passed: int
    scored: int
    mean_reward: float | None
    """Over the scored attempts."""


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """Pass rate of one policy version on one set of tasks."""

    version: int
    attempts: int
    """Per task, as planned."""
    tasks: int
    pass_rate: float | None
    """Share of the scored attempts that passed; None when none was scored."""
    interval: tuple[float, float]
    """95 %, over other tasks of the same kind."""
    pass_at: dict[str, float]
    """Unbiased pass@k by k, for powers of two up to the number of attempts."""
    mean_reward: float | None
    scored: int
    """Attempts with a reward, all tasks together."""
    truncated: int
    """Those of them that a budget ended."""
    held: int
    """Attempts without a reward because a screen held them."""
    infra_failures: int
    """Attempts without a reward because infrastructure or grader failed, after retries."""
    failures: dict[str, int]
    """Every try without a reward, replaced ones included, by `component/reason`."""
    per_task: tuple[TaskResult, ...]
    seconds: float

    @property
    def is_valid(self) -> bool:
        """Whether few enough attempts failed for the numbers to mean something."""
        return self.infra_failures <= MAX_INFRA_SHARE * self.attempts * self.tasks


def report_key(version: int) -> str:
    """Return where the report of a version lies in the run directory."""
    return f"evals/{version}/report.json"


async def evaluate(
    player: RolloutPlayer,
    tasks: Sequence[Task],
    plan: EvalPlan,
    *,
    version: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> EvalReport:
    """Play every task `plan.attempts` times under exactly this policy version.

    `on_trajectory` hears of every try as it ends. Raise `ConfigError` without tasks.
    """
    if not tasks:
        msg = "no held-out tasks to evaluate on: set tasks.heldout or tasks.num_heldout"
        raise ConfigError(msg)
    started = perf_counter()
    concurrency = asyncio.Semaphore(plan.concurrency)
    async with asyncio.TaskGroup() as plays:
        places = [
            plays.create_task(
                _play(player, task, plan, version=version, index=index, concurrency=concurrency, told=on_trajectory),
                name=f"eval {task.task_id}-{index}",
            )
            for task in tasks
            for index in range(plan.attempts)
        ]
    tries = [trajectory for place in places for trajectory in place.result()]
    return report(tries, tasks, plan, version=version, seconds=perf_counter() - started)


def report(
    tries: Sequence[Trajectory], tasks: Sequence[Task], plan: EvalPlan, *, version: int, seconds: float
) -> EvalReport:
    """Return what the tries came to."""
    rewards: dict[str, list[float]] = {task.task_id: [] for task in tasks}
    failures: dict[str, int] = {}
    for trajectory in tries:
        if trajectory.outcome in WITH_REWARD and trajectory.reward is not None:
            rewards[trajectory.task_id].append(trajectory.reward)
        else:
            failure = trajectory.failure
            name = f"{failure.component}/{failure.reason}" if failure else trajectory.outcome.value
            failures[name] = failures.get(name, 0) + 1
    per_task = tuple(_task_result(task_id, gained, plan.pass_reward) for task_id, gained in rewards.items())
    tallies = [Tally(passed=result.passed, scored=result.scored) for result in per_task]
    gained = [reward for of_task in rewards.values() for reward in of_task]
    held = sum(trajectory.outcome is Outcome.HELD for trajectory in tries)
    ks = [1 << power for power in range(plan.attempts.bit_length()) if any(tally.scored >> power for tally in tallies)]
    return EvalReport(
        version=version,
        attempts=plan.attempts,
        tasks=len(tasks),
        pass_rate=pass_rate(tallies) if gained else None,
        interval=clustered_interval(tallies, seed=plan.seed),
        pass_at={str(k): mean_pass_at_k(tallies, k) for k in ks},
        mean_reward=sum(gained) / len(gained) if gained else None,
        scored=len(gained),
        truncated=sum(trajectory.outcome is Outcome.TRUNCATED for trajectory in tries),
        held=held,
        infra_failures=plan.attempts * len(tasks) - len(gained) - held,
        failures=failures,
        per_task=per_task,
        seconds=seconds,
    )


async def _play(
    player: RolloutPlayer,
    task: Task,
    plan: EvalPlan,
    *,
    version: int,
    index: int,
    concurrency: asyncio.Semaphore,
    told: Callable[[Trajectory], None] | None,
) -> list[Trajectory]:
    """Return all tries of one attempt: infrastructure failures are tried again."""
    tries: list[Trajectory] = []
    async with concurrency:
        while len(tries) <= plan.retries:
            trajectory = await player.play(
                task,
                group_id=f"eval-v{version}-{task.task_id}",
                index=index,
                seed=_seed(plan.seed, task.task_id, index, len(tries)),
                purpose="eval",
                attempt=len(tries),
                exact_version=version,
            )
            tries.append(trajectory)
            if told is not None:
                told(trajectory)
            if trajectory.outcome is not Outcome.INFRA_ERROR:
                break
    return tries


def _task_result(task_id: str, rewards: Sequence[float], pass_reward: float) -> TaskResult:
    """Return what the scored attempts at one task came to."""
    return TaskResult(
        task_id=task_id,
        passed=sum(reward >= pass_reward for reward in rewards),
        scored=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def _seed(seed: int, task_id: str, index: int, attempt: int) -> int:
    """Return the seed of one try; it does not depend on the version, so that two versions face the same draws."""
    name = f"{seed}/eval/{task_id}/{index}/{attempt}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
