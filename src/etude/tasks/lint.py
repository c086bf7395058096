"""Everything that is wrong, or will surprise, about one task or a directory of tasks."""

import re
from collections.abc import Iterator
from pathlib import Path

from etude.errors import TaskError
from etude.tasks.finding import Finding, Severity, printable, warning
from etude.tasks.harbor import Examination, examine, task_directories
from etude.tasks.tree import Tree, read_bytes

MAX_SCRIPT_BYTES = 1 << 20
_FETCHES = re.compile(
    rb"^[^#\n]*\b(curl|wget|git clone|pip3? install|apt(?:-get)? install|uvx?|npx|npm install)\b", re.M
)
_STRAY = re.compile(r"(^|/)(__pycache__|\.git|\.DS_Store|\.pytest_cache)(?=/|$)")


def lint(directory: Path) -> list[Finding]:
    """Return all problems of a task directory, or of every task in a directory of tasks; errors first.

    A directory with a `task.toml` or an `instruction.md` is taken for a task.
    """
    try:
        is_task = any((directory / name).exists() for name in ("task.toml", "instruction.md"))
        paths = [directory] if is_task else task_directories(directory)
    except TaskError as error:
        return [_failed(directory, error)]
    findings = [finding for path in paths for finding in _lint_task(path)]
    return sorted(findings, key=lambda item: item.severity is Severity.WARNING)


def _lint_task(path: Path) -> list[Finding]:
    try:
        examination = examine(path)
    except TaskError as error:
        return [_failed(path, error)]
    return [
        *examination.findings,
        *_habits(path, examination),
        *_leaks(path, examination.tree),
        *_scripts(path, examination.tree),
    ]


def _failed(path: Path, error: TaskError) -> Finding:
    place = printable(path)
    return Finding(path=place, message=str(error).removeprefix(f"{place}: "))


def _habits(path: Path, examination: Examination) -> Iterator[Finding]:
    task_file = examination.task_file
    if task_file and "environment_mode" not in task_file.verifier.model_fields_set:
        yield warning(
            path / "task.toml",
            "Harbor would run the tests where the agent was; here they run in a fresh copy",
            "write environment_mode = 'separate'",
            field="verifier.environment_mode",
        )
    if task_file and "timeout_sec" not in task_file.agent.model_fields_set:
        yield warning(
            path / "task.toml",
            f"absent, so {task_file.agent.timeout_sec:g} s are given",
            "write how long the task takes",
            field="agent.timeout_sec",
        )
    strays = {name[: found.end()] for name in examination.tree.files if (found := _STRAY.search(name))}
    for name in sorted(strays):
        yield warning(path / name, "looks like a left-over and changes the task's digest", "delete it")


def _leaks(path: Path, tree: Tree) -> Iterator[Finding]:
    """Find bytes of tests or solution among what the agent is given."""
    hidden = {
        file.sha256: name
        for name, file in tree.files.items()
        if name.startswith(("tests/", "solution/")) and file.num_bytes
    }
    for name, file in tree.files.items():
        original = hidden.get(file.sha256)
        if original is None or not name.startswith("environment/"):
            continue
        if original.endswith(".sh"):
            yield Finding(path=printable(path / name), message=f"is {original}, which the agent must not see")
        else:
            yield warning(path / name, f"is the same as {original}", "keep tests and answers out of environment/")


def _scripts(path: Path, tree: Tree) -> Iterator[Finding]:
    test = path / "tests/test.sh"
    if "tests/test.sh" in tree.files:
        if not tree.files["tests/test.sh"].executable:
            yield Finding(path=printable(test), message="is not executable", hint="chmod +x it")
        text = _script(test)
        if not text.startswith(b"#!"):
            yield Finding(path=printable(test), message="has no interpreter line", hint="begin with #!/bin/bash")
        if found := _FETCHES.search(text):
            tool = found[1].decode()
            yield warning(test, f"uses {tool!r}, but grading has no network", "put it into environment/")
        if b"/logs/verifier/reward" not in text and not _writes_reward(path, tree):
            yield warning(test, "nothing in tests/ names /logs/verifier/reward.txt", "write the reward there")
    dockerfile = path / "environment/Dockerfile"
    if "environment/Dockerfile" in tree.files and _installs_unpinned(_script(dockerfile)):
        yield warning(dockerfile, "installs packages without versions", "pin them with ==", field="RUN")


def _installs_unpinned(text: bytes) -> bool:
    return any(b"pip install" in line and b"==" not in line and b" -r " not in line for line in text.splitlines())


def _script(path: Path) -> bytes:
    try:
        return read_bytes(path, max_bytes=MAX_SCRIPT_BYTES)
    except TaskError:
        # Too large to be read here; `examine` bounds it where that matters.
        return b"#!"


def _writes_reward(path: Path, tree: Tree) -> bool:
    names = [name for name in tree.files if name.startswith("tests/")]
    return any(b"/logs/verifier/reward" in _script(path / name) for name in names)
