# pyright: basic
"""The generated task family: deterministic, disjoint, and with tests that see every fault."""

import asyncio
from itertools import islice

import pytest
import pytest_asyncio

from etude.environments.local import LocalBackend
from etude.rewards.grader import HarborGrader
from etude.tasks import pyfix
from etude.tasks.harbor import load_task, load_tasks
from etude.tasks.lint import lint
from etude.tasks.pyfix_library import BLUEPRINTS


def take(count, seed="test", exclude=frozenset()):
    return list(islice(pyfix.problems(seed, exclude=exclude), count))


def results(lines, problem):
    """What a module's functions return for the calls of the tests, computed apart from the generator."""
    namespace = {}
    exec("\n".join(lines), namespace)
    return [namespace[case["function"]](*case["arguments"]) for case in pyfix.cases(problem)]


def test_the_same_seed_gives_the_same_tasks_byte_for_byte(tmp_path):
    for name in ("one", "two"):
        for problem in take(12):
            pyfix.write_task(problem, tmp_path / name)
    one, two = (load_tasks(tmp_path / name) for name in ("one", "two"))
    assert [(task.task_id, task.digest) for task in one] == [(task.task_id, task.digest) for task in two]
    assert take(12, "other") != take(12)


def test_no_module_text_is_met_twice_within_or_across_splits():
    heldout = take(60, "heldout")
    train = take(300, exclude=pyfix.texts_of(heldout))
    texts = [text for problem in heldout + train for text in pyfix.texts_of([problem])]
    assert len(texts) == len(set(texts)) == 2 * 360


def test_at_least_six_kinds_of_fault_are_common():
    kinds = [problem.kind for problem in take(300)]
    assert sum(kinds.count(kind) >= 10 for kind in set(kinds)) >= 6


def test_every_fault_of_the_library_is_used():
    planned = {(blueprint.name, fault.kind, fault.broken) for blueprint in BLUEPRINTS for fault in blueprint.faults}
    used = set()
    for problem in take(1200):
        blueprint = problem.functions[0].blueprint
        kinds = {fault.kind: fault.broken for fault in blueprint.faults}
        used.add((blueprint.name, problem.kind, kinds[problem.kind]))
    assert used == planned


def test_one_line_breaks_the_module_and_the_tests_see_it():
    for problem in take(200):
        differing = [
            index for index, pair in enumerate(zip(problem.right, problem.broken, strict=True)) if len(set(pair)) > 1
        ]
        assert differing == [problem.line]
        expected = [case["expected"] for case in pyfix.cases(problem)]
        assert results(problem.right, problem) == expected
        assert results(problem.broken, problem) != expected


def test_written_tasks_are_without_findings_and_say_what_they_are(tmp_path):
    problem = take(1)[0]
    task = load_task(pyfix.write_task(problem, tmp_path))
    assert not lint(tmp_path / task.task_id)
    assert task.metadata["kind"] == problem.kind
    assert task.instruction == pyfix.instruction(problem)
    assert problem.right[problem.line] not in task.instruction


def one_of_each_kind():
    found = {}
    for problem in take(300):
        found.setdefault(problem.kind, problem)
    return list(found.values())


@pytest_asyncio.fixture
async def backend():
    started = await LocalBackend.start()
    yield started
    await started.close()


@pytest.mark.slow
async def test_every_kind_fails_as_it_is_and_passes_once_repaired_in_a_real_sandbox(backend, tmp_path):
    grader = HarborGrader(backend)

    async def rewards(problem):
        task = load_task(pyfix.write_task(problem, tmp_path))
        async with backend.create(task) as sandbox:
            done = await sandbox.execute(["sh", "-c", problem.repair], timeout_s=20, cwd=task.workdir)
            assert done.exit_code == 0, done.stderr
            repaired = await sandbox.changes(max_bytes=1 << 20)
        assert repaired == {f"{problem.module}.py": ("\n".join(problem.right) + "\n").encode()}
        grades = [await grader.grade(task, change) for change in ({}, repaired)]
        return [grade.reward for grade in grades]

    problems = one_of_each_kind()
    assert len(problems) >= 6
    assert await asyncio.gather(*map(rewards, problems)) == [[0.0, 1.0]] * len(problems)


@pytest.mark.slow
async def test_code_under_test_cannot_pass_by_ending_early_or_answering_for_itself(backend, tmp_path):
    grader = HarborGrader(backend)
    problem = take(1)[0]
    task = load_task(pyfix.write_task(problem, tmp_path))
    name = problem.functions[0].blueprint.name
    cheats = [
        "import os\nos._exit(0)\n",
        f"class Same:\n    def __eq__(self, other): return True\ndef {name}(*_): return Same()\n",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'1\\n' * 8)\n"
        "    except OSError: pass\nos._exit(0)\n",
        "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\n",
    ]
    grades = await asyncio.gather(*(grader.grade(task, {f"{problem.module}.py": cheat.encode()}) for cheat in cheats))
    assert all(grade.reward in (0.0, None) for grade in grades)
