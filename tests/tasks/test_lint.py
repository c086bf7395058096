# pyright: basic
import shutil
from itertools import islice

import pytest

from etude.tasks import pyfix
from etude.tasks.finding import Finding, Severity
from etude.tasks.harbor import load_tasks
from etude.tasks.lint import lint


@pytest.fixture
def task(tmp_path):
    """A task without findings."""
    path = tmp_path / "tasks" / "clean"
    for folder in ("environment", "tests", "solution"):
        (path / folder).mkdir(parents=True)
    (path / "task.toml").write_text(
        'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n[agent]\ntimeout_sec = 30\n'
        '[verifier]\nenvironment_mode = "separate"\n'
    )
    (path / "instruction.md").write_text("Repair it.\n")
    (path / "environment/Dockerfile").write_text("FROM python:3.11\nCOPY main.py /app/\n")
    (path / "environment/main.py").write_text("x = 1\n")
    (path / "tests/test.sh").write_text("#!/bin/sh\npython3 /tests/check.py > /logs/verifier/reward.txt\n")
    (path / "tests/check.py").write_text("print(1)\n")
    (path / "tests/test.sh").chmod(0o755)
    (path / "solution/solve.sh").write_text("#!/bin/sh\necho x = 2 > main.py\n")
    return path


def only(findings, severity):
    (finding,) = findings
    assert finding.severity is severity
    return finding.line()


def test_a_clean_task_has_no_findings_alone_or_among_others(task):
    assert lint(task) == []
    assert lint(task.parent) == []


def test_all_problems_of_all_tasks_are_found_in_one_go(task):
    broken = task.parent / "broken"
    shutil.copytree(task, broken)
    (broken / "instruction.md").write_text("")
    (broken / "environment/Dockerfile").write_text("FROM python\nCOPY ../tests /app/\n")
    (broken / "task.toml").write_text("scheme_version = 1\n[environment]\ncpu = 1\n[steps]\na = 1\n")
    (broken / "tests/test.sh").write_text("echo 1")
    worse = task.parent / "worse"
    worse.mkdir()
    found = {(finding.path.removeprefix(f"{task.parent}/"), finding.field) for finding in lint(task.parent)}
    assert found == {
        ("broken/instruction.md", ""),
        ("broken/environment/Dockerfile", "FROM"),
        ("broken/environment/Dockerfile", "COPY"),
        ("broken/task.toml", "scheme_version"),
        ("broken/task.toml", "schema_version"),
        ("broken/task.toml", "environment.network_mode"),
        ("broken/task.toml", "environment.cpu"),
        ("broken/task.toml", "steps"),
        ("broken/tests/test.sh", ""),
        ("worse", ""),
    }


def test_errors_come_before_warnings(task):
    (task / "environment/Dockerfile").write_text("FROM python\nCOPY nothing /app/\n")
    severities = [finding.severity for finding in lint(task)]
    assert severities == [Severity.ERROR, Severity.WARNING]


def test_a_test_script_that_cannot_be_started_is_an_error(task):
    (task / "tests/test.sh").chmod(0o644)
    assert "is not executable; chmod +x it" in only(lint(task), Severity.ERROR)
    (task / "tests/test.sh").chmod(0o755)
    (task / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    assert "has no interpreter line" in only(lint(task), Severity.ERROR)


@pytest.mark.parametrize("name", ["tests/test.sh", "solution/solve.sh"])
def test_scripts_of_tests_or_solution_among_what_the_agent_sees_are_an_error(task, name):
    shutil.copy(task / name, task / "environment/innocent.txt")
    assert f"environment/innocent.txt: is {name}, which the agent must not see" in only(lint(task), Severity.ERROR)


def test_other_files_shared_with_the_tests_are_a_warning(task):
    (task / "environment/seen").mkdir()
    shutil.copy(task / "tests/check.py", task / "environment/seen/check.py")
    assert "environment/seen/check.py: is the same as tests/check.py" in only(lint(task), Severity.WARNING)


def test_tests_copied_into_the_image_are_an_error(task):
    (task / "environment/Dockerfile").write_text("FROM python:3.11\nCOPY main.py /tests/main.py\n")
    assert "'/tests/main.py' is reserved" in only(lint(task), Severity.ERROR)


@pytest.mark.parametrize("image", ["python", "python:latest", "registry:5000/python", "--platform=linux/amd64 python"])
def test_an_image_without_a_version_is_a_warning(task, image):
    (task / "environment/Dockerfile").write_text(f"FROM {image}\n")
    assert "may become another image; name a tag" in only(lint(task), Severity.WARNING)


@pytest.mark.parametrize("image", ["python:3.11", "registry:5000/python:3", f"python@sha256:{'0' * 64}", "scratch"])
def test_an_image_with_a_version_is_no_finding(task, image):
    (task / "environment/Dockerfile").write_text(f"FROM {image} AS main\n")
    assert lint(task) == []


@pytest.mark.parametrize(
    ("command", "pinned"),
    [("pip install numpy", False), ("pip install numpy==2.0", True), ("pip install -r requirements.txt", True)],
)
def test_packages_without_versions_are_a_warning(task, command, pinned):
    (task / "environment/Dockerfile").write_text(f"FROM python:3.11\nRUN {command}\n")
    findings = lint(task)
    assert [finding.field for finding in findings] == ([] if pinned else ["RUN"])


@pytest.mark.parametrize("command", ["curl x", "  pip install pytest", "x && apt-get install y", "uvx pytest"])
def test_tests_that_need_a_network_are_a_warning(task, command):
    (task / "tests/test.sh").write_text(f"#!/bin/sh\n{command}\necho 1 > /logs/verifier/reward.txt\n")
    assert "grading has no network" in only(lint(task), Severity.WARNING)


def test_tests_that_never_write_a_reward_are_a_warning(task):
    (task / "tests/test.sh").write_text("#!/bin/sh\n# curl is only mentioned\nexit 0\n")
    assert "nothing in tests/ names /logs/verifier/reward.txt" in only(lint(task), Severity.WARNING)


def test_what_harbor_would_do_otherwise_is_a_warning(task):
    text = (task / "task.toml").read_text().replace('environment_mode = "separate"\n', "")
    (task / "task.toml").write_text(text)
    assert "verifier.environment_mode" in only(lint(task), Severity.WARNING)


def test_left_overs_are_reported_once_per_folder(task):
    (task / "tests/__pycache__").mkdir()
    for number in range(3):
        (task / f"tests/__pycache__/{number}.pyc").write_text(str(number))
    assert "tests/__pycache__: looks like a left-over" in only(lint(task), Severity.WARNING)


def test_a_directory_that_cannot_be_listed_is_a_finding(tmp_path):
    assert "No such file or directory" in only(lint(tmp_path / "none"), Severity.ERROR)
    assert "holds 0 tasks" in only(lint(tmp_path), Severity.ERROR)


def test_whatever_has_no_errors_can_be_loaded(task, tmp_path):
    family = tmp_path / "family"
    family.mkdir()
    for problem in islice(pyfix.problems("lint"), 8):
        pyfix.write_task(problem, family)
    assert all(finding.severity is Severity.WARNING for finding in lint(family))
    assert len(load_tasks(family)) == 8


def test_a_finding_on_one_line_names_place_field_problem_and_remedy():
    finding = Finding(path="a/task.toml", field="agent.user", message="must be 'agent'", hint="delete it")
    assert finding.line() == "a/task.toml: agent.user: must be 'agent'; delete it"
