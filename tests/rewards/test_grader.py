# pyright: basic
import asyncio

import pytest

from etude.environments.local import LocalBackend
from etude.interfaces import Grader
from etude.rewards.grader import HarborGrader

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOLVED: dict[str, bytes | None] = {"solution.py": b"def add(a, b):\n    return a + b\n"}


def script(text: str) -> dict[str, str]:
    return {"test.sh": "#!/bin/sh\n" + text}


async def test_the_reward_is_that_of_the_tests(isolated, make_task):
    grader: Grader = HarborGrader(isolated)
    task = make_task()
    solved, unsolved = await asyncio.gather(grader.grade(task, SOLVED), grader.grade(task, {}))
    assert (solved.reward, solved.components) == (1.0, {"reward": 1.0})
    assert (unsolved.reward, unsolved.failure) == (0.0, "")


async def test_tests_run_as_root_in_the_workdir_of_a_sandbox_where_results_are_empty(isolated, make_task):
    text = "id -un; pwd; ls -A /logs/verifier; ls /tests; echo 0.25 > /logs/verifier/reward.txt"
    grade = await HarborGrader(isolated).grade(make_task(script(text)), {})
    assert grade.reward == 0.25
    assert grade.log.split("\n")[:3] == ["root", "/app", "test.sh"]


async def test_code_under_test_can_neither_read_the_tests_nor_write_the_reward(isolated, make_task):
    run = """
        import subprocess
        for command in ("cat /tests/test.sh", "echo 1 > /logs/verifier/reward.txt", "touch /tests/x"):
            print(subprocess.run(["sh", "-c", command], user="agent", group="agent", extra_groups=[]).returncode)
    """.replace("        ", "")
    tests = script("python3 -I /tests/run.py; echo 0 > /logs/verifier/reward.txt\n") | {"run.py": run}
    grade = await HarborGrader(isolated).grade(make_task(tests), {})
    assert grade.reward == 0.0
    assert not {"0"} & set(grade.log.split("\n")[:3])


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("true", "no_reward"),
        ("exit 1", "no_reward"),
        ("echo nan > /logs/verifier/reward.txt", "bad_reward"),
        ("echo 7 > /logs/verifier/reward.txt", "bad_reward"),
        ("echo '[1]' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "bad_reward"),
        ("echo 1 > /tmp/x; ln -s /tmp/x /logs/verifier/reward.txt", "no_reward"),
        ("mkfifo /logs/verifier/reward.txt", "no_reward"),
        ("mkdir /logs/verifier/reward.json", "no_reward"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "sandbox"),
        ("echo 1 > /logs/verifier/reward.txt; chown agent /logs/verifier/reward.txt", "no_reward"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "tests_timeout"),
    ],
)
async def test_what_is_no_valid_reward_is_a_failure_and_never_a_score(isolated, make_task, text, failure):
    task = make_task(script(text), verifier_timeout_s=1.0)
    grade = await HarborGrader(isolated).grade(task, {})
    assert grade.reward is None
    assert grade.failure.split(":")[0] == failure


async def test_reward_json_counts_before_reward_txt(isolated, make_task):
    text = 'echo 1 > /logs/verifier/reward.txt; echo \'{"a": 0.5, "b": 0}\' > /logs/verifier/reward.json'
    grade = await HarborGrader(isolated).grade(make_task(script(text)), {})
    assert (grade.reward, grade.components) == (0.25, {"a": 0.5, "b": 0.0})


async def test_a_protected_file_may_be_changed_where_the_task_brings_it(isolated, make_task):
    text = "cat conftest.py pytest.ini; echo 0 > /logs/verifier/reward.txt"
    task = make_task(script(text), app={"conftest.py": "old"})
    change = {"conftest.py": b"new\n", "pytest.ini": b"added\n", "__pycache__/x.pyc": b"", "a/b.txt": b"", "../x": b""}
    grade = await HarborGrader(isolated, screens=()).grade(task, change)
    assert "new" in grade.log
    assert "added" not in grade.log


async def test_deleted_files_are_gone_and_new_directories_are_made(isolated, make_task):
    text = "find . -type f | sort; echo 0 > /logs/verifier/reward.txt"
    task = make_task(script(text), app={"old": "x", "-f": "y"})
    change = {"old": None, "-f": None, "never-there": None, "deep/er/new.py": b"z", "old/now-a-directory": b""}
    grade = await HarborGrader(isolated).grade(task, change)
    assert grade.log.split() == ["./deep/er/new.py", "./old/now-a-directory", "./solution.py"]


async def test_a_task_that_cannot_be_graded_is_a_failure(isolated, make_task, tmp_path):
    task = make_task()
    grader = HarborGrader(isolated)
    (tmp_path / "task" / "tests" / "link").symlink_to("/etc/passwd")
    linked = await grader.grade(task, {})
    (tmp_path / "task" / "tests" / "link").unlink()
    (tmp_path / "task" / "tests" / "test.sh").unlink()
    missing = await grader.grade(task, {})
    assert linked.failure.startswith("task: ")
    assert "test.sh" in missing.failure
    assert linked.reward is missing.reward is None


async def test_a_sandbox_that_cannot_be_made_is_a_failure(make_task):
    backend = await LocalBackend.start()
    await backend.close()
    grade = await HarborGrader(backend).grade(make_task(), {})
    assert grade.reward is None
    assert grade.failure.startswith("sandbox: ")
