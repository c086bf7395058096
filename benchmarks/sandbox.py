"""What a sandbox of the local backend costs.

    python benchmarks/sandbox.py [--json FILE] [--sandboxes N] [--parallel N]

`start` is from asking for a sandbox to the end of its first command, `exec` one more /bin/true in it, `destroy` leaving
its block, `grade` grading a task of the pyfix family. CPU is that of this process and of all sandboxes together.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.environments.local import LocalBackend
from etude.rewards.grader import HarborGrader
from etude.tasks.pyfix import problems, write_task
from etude.types import Task

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[int(share * 100) - 1]


def cpu_seconds(zygote: int) -> float:
    """Used so far by this process, by the zygote, and by the sandboxes that have ended."""
    fields = Path(f"/proc/{zygote}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + time.process_time()


async def one_sandbox(backend: LocalBackend, task: Task, times: dict[str, list[float]]) -> None:
    marks = [time.perf_counter()]
    async with backend.create(task) as environment:
        for _ in range(2):
            result = await environment.execute(["/bin/true"], timeout_s=10)
            assert result.exit_code == 0, result
            marks.append(time.perf_counter())
    marks.append(time.perf_counter())
    for name, begin, end in zip(("start", "exec", "destroy"), marks, marks[1:], strict=False):
        times.setdefault(name, []).append(end - begin)


async def measured(
    backend: LocalBackend, work: Callable[[], Awaitable[None]], *, count: int, parallel: int
) -> tuple[float, float]:
    """Do `work` `count` times; return seconds per piece, and CPU seconds per piece."""
    gate = asyncio.Semaphore(parallel)

    async def gated() -> None:
        async with gate:
            await work()

    begin, cpu = time.perf_counter(), cpu_seconds(backend.process_id)
    async with asyncio.TaskGroup() as pieces:
        for _ in range(count):
            pieces.create_task(gated())
    return (time.perf_counter() - begin) / count, (cpu_seconds(backend.process_id) - cpu) / count


async def run(directory: Path, *, count: int, parallel: int) -> dict[str, float]:
    path = write_task(next(problems(0)), directory)
    task = Task(task_id="benchmark", path=str(path), digest="benchmark", instruction="")
    report: dict[str, float] = {}
    begin = time.perf_counter()
    backend = await LocalBackend.start()
    report["backend_start_ms"] = (time.perf_counter() - begin) * 1e3
    grader = HarborGrader(backend)
    times: dict[str, list[float]] = {}
    graded: list[float] = []

    async def grade() -> None:
        started = time.perf_counter()
        result = await grader.grade(task, {})
        assert result.reward == 0.0, result
        graded.append(time.perf_counter() - started)

    for label, concurrency in (("serial", 1), ("parallel", parallel)):
        times.clear()
        wall, cpu = await measured(
            backend, lambda: one_sandbox(backend, task, times), count=count, parallel=concurrency
        )
        for name, values in times.items():
            report[f"{label}_{name}_p50_ms"] = quantile(values, 0.5) * 1e3
            report[f"{label}_{name}_p95_ms"] = quantile(values, 0.95) * 1e3
        report[f"{label}_sandboxes_per_s"] = 1 / wall
        report[f"{label}_cpu_per_sandbox_ms"] = cpu * 1e3
    wall, cpu = await measured(backend, grade, count=count, parallel=1)
    report["grade_p50_ms"] = quantile(graded, 0.5) * 1e3
    report["grade_p95_ms"] = quantile(graded, 0.95) * 1e3
    report["grade_cpu_ms"] = cpu * 1e3
    await backend.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--sandboxes", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = asyncio.run(run(Path(directory), count=arguments.sandboxes, parallel=arguments.parallel))
    for name, value in report.items():
        print(f"{name:32} {value:9.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
