# pyright: basic
"""What agents, tasks and tests leave or do never holds up the event loop of the controller."""

import asyncio
from contextlib import asynccontextmanager
from time import perf_counter

import pytest

from etude.rewards.grader import HarborGrader
from etude.rewards.screens import SCREENS, reaches_for_the_grader

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
BOUND_S = 1.0


@asynccontextmanager
async def measured():
    """Yield a list that grows by how late the event loop was at each look."""
    late = [0.0]

    async def look():
        while True:
            began = perf_counter()
            await asyncio.sleep(0.01)
            late.append(perf_counter() - began - 0.01)

    looking = asyncio.create_task(look())
    try:
        yield late
    finally:
        looking.cancel()


def script(text):
    return {"test.sh": f"#!/bin/sh\n{text}\n"}


async def test_the_measure_sees_a_grader_that_works_in_the_loop():
    async with measured() as late:
        await asyncio.sleep(0.05)
        began = perf_counter()
        while perf_counter() - began < 1.2:
            pass
        await asyncio.sleep(0.05)
    assert max(late) > BOUND_S


async def test_tests_that_spin_sleep_and_flood_do_not_hold_up_the_loop(isolated, make_task):
    grader = HarborGrader(isolated)
    texts = {
        "spin": "while :; do :; done",
        "sleep": "sleep 60",
        "flood": "yes | head -c 300000000; yes >&2",
        "files": "head -c 60000000 /dev/zero > /logs/verifier/reward.txt",
    }
    tasks = [make_task(script(text), name=name, verifier_timeout_s=2.0) for name, text in texts.items()]
    async with measured() as late:
        grades = await asyncio.gather(*(grader.grade(task, {}) for task in tasks))
    assert [grade.reward for grade in grades] == [None] * 4
    assert max(late) < BOUND_S, sorted(late)[-3:]


async def test_a_huge_change_is_read_screened_and_placed_beside_the_loop(isolated, make_task):
    task = make_task(script("echo 1 > /logs/verifier/reward.txt"), storage_mb=128)
    async with isolated.create(task) as environment:
        wrote = await environment.execute(
            ["sh", "-c", "yes 'import os' | head -c 60000000 > big.py; for n in $(seq 1000); do echo $n > f$n; done"],
            timeout_s=30,
        )
        assert wrote.exit_code == 0
        async with measured() as late:
            change = await environment.changes(max_bytes=128 * MIB)
            grade = await HarborGrader(isolated, screens=SCREENS).grade(task, change)
    assert len(change) == 1001
    assert (grade.reward, grade.failure) == (1.0, "")
    assert max(late) < BOUND_S, sorted(late)[-3:]


async def test_a_screen_finds_the_same_wherever_a_file_is_cut_for_it(make_task):
    task = make_task()
    for before in (0, MIB - 20, MIB - 5, MIB, MIB + 255, 3 * MIB - 9):
        text = b"#" * before + b"\nopen('/logs/verifier/x')\n"
        assert reaches_for_the_grader(task, {"a.py": text}) == "a.py:2: open('/logs/verifier/x')"
    assert reaches_for_the_grader(task, {"a.py": b"x" * (3 * MIB)}) == ""
