"""Harbor task directories: `task.toml`, `instruction.md`, `environment/`, `tests/` and an optional `solution/`."""

from pathlib import Path

import msgspec

from etude.errors import TaskError
from etude.tasks.dockerfile import Dockerfile, read_dockerfile, workdir_problems
from etude.tasks.finding import Finding, Severity, printable
from etude.tasks.schema import TaskFile, parse_task_file
from etude.tasks.tree import Tree, read_bytes, read_tree
from etude.types import Task

DEFAULT_WORKDIR = "/app"
MAX_TEXT_BYTES = 64 << 10
"""Of `task.toml`, `instruction.md` and `Dockerfile`: an instruction must fit into one argument of a command."""
MAX_TASKS = 100_000

UNSUPPORTED_FILES = {
    "trajectory.json": "a task that continues an earlier session is not supported; recap it in instruction.md",
    "steps": "multi-step tasks are not supported; make each step a task",
    "environment/docker-compose.yaml": "several containers are not supported; describe one in environment/Dockerfile",
    "environment/docker-compose.yml": "several containers are not supported; describe one in environment/Dockerfile",
    "environment/singularity-compose.yaml": "several containers are not supported; describe one in Dockerfile",
    "tests/Dockerfile": "a separate verifier image is not supported; grading uses a fresh copy of the task's own",
    "tests/docker-compose.yaml": "a separate verifier image is not supported; grading uses a copy of the task's own",
}
"""Files and directories of Harbor's layout that etude refuses, with what to do instead."""

REQUIRED_FILES = {
    "task.toml": "describe the task's limits there",
    "instruction.md": "write what the agent is asked to do",
    "environment/Dockerfile": "write FROM, WORKDIR and COPY lines",
    "tests/test.sh": "write a script that puts the reward into /logs/verifier/reward.txt",
}


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out about one directory."""

    findings: tuple[Finding, ...]
    task: Task | None
    """None when one of the findings is an error."""
    tree: Tree
    task_file: TaskFile | None


def load_task(path: Path) -> Task:
    """Read and validate one task directory.

    Raises:
        TaskError: With every problem, each with its file and field.
    """
    examination = examine(path)
    if examination.task is None:
        errors = [item.line() for item in examination.findings if item.severity is Severity.ERROR]
        raise TaskError("\n".join(errors))
    return examination.task


def load_tasks(directory: Path) -> list[Task]:
    """Read every subdirectory of a directory as a task, sorted by `task_id`.

    Raises:
        TaskError: When there are none, or with every problem of every task.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    for path in task_directories(directory):
        try:
            tasks.append(load_task(path))
        except TaskError as error:
            problems.append(str(error))
    if problems:
        raise TaskError("\n".join(problems))
    return sorted(tasks, key=lambda task: task.task_id)


def task_directories(directory: Path) -> list[Path]:
    """Return the subdirectories that should be tasks, sorted; names that begin with a dot are left out.

    Raises:
        TaskError: When the directory cannot be listed, has none, or has two whose names differ in case only.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise TaskError(f"{printable(directory)}: {error.strerror}; name a directory of Harbor tasks") from error
    if not paths or len(paths) > MAX_TASKS:
        raise TaskError(f"{printable(directory)}: holds {len(paths)} tasks; 1 to {MAX_TASKS} are needed")
    seen: dict[str, Path] = {}
    for path in paths:
        if twin := seen.get(path.name.casefold()):
            raise TaskError(f"{printable(path)}: the same task id as {printable(twin)}; rename one of them")
        seen[path.name.casefold()] = path
    return paths


def examine(path: Path) -> Examination:
    """Find everything that is wrong with a task directory.

    Raises:
        TaskError: When it is not a directory that can be read, or far too large for a task.
    """
    if not path.is_dir():
        raise TaskError(f"{printable(path)}: not a directory; name a directory with a task.toml")
    tree = read_tree(path)
    findings = [*_name_findings(path), *tree.findings, *_layout_findings(path, tree)]
    task_file = _task_file(path, tree, findings)
    instruction = _text(path, tree, "instruction.md", findings)
    dockerfile = _dockerfile(path, tree, findings)
    if instruction is not None and not instruction.strip():
        place = printable(path / "instruction.md")
        findings.append(Finding(path=place, message="is empty", hint="say what is to be done"))
    workdir = _workdir(path, task_file, dockerfile, findings)
    task = None
    if task_file and instruction and not any(item.severity is Severity.ERROR for item in findings):
        task = Task(
            task_id=path.resolve().name,
            path=str(path.resolve()),
            digest=tree.digest(),
            instruction=instruction,
            workdir=workdir,
            agent_timeout_s=task_file.agent.timeout_sec,
            verifier_timeout_s=task_file.verifier.timeout_sec,
            cpus=task_file.environment.cpus,
            memory_mb=task_file.environment.memory_mb,
            storage_mb=task_file.environment.storage_mb,
            env=(dockerfile.env if dockerfile else {}) | task_file.environment.env,
            metadata=task_file.facts(),
        )
    return Examination(findings=tuple(findings), task=task, tree=tree, task_file=task_file)


def _name_findings(path: Path) -> list[Finding]:
    name = path.resolve().name
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    if name[:1].isalnum() and plain.isalnum() and name.isascii():
        return []
    hint = "use letters, digits, '.', '_' and '-'"
    return [Finding(path=printable(path), message="the directory's name cannot be a task id", hint=hint)]


def _layout_findings(path: Path, tree: Tree) -> list[Finding]:
    if not REQUIRED_FILES.keys() & tree.files:
        return [
            Finding(path=printable(path), message="has no file of a task", hint=f"needs {', '.join(REQUIRED_FILES)}")
        ]
    folders = {name.partition("/")[0] for name in tree.files if "/" in name}
    missing = [
        Finding(path=printable(path / name), message="is missing", hint=hint)
        for name, hint in REQUIRED_FILES.items()
        if name not in tree.files
    ]
    unsupported = [
        Finding(path=printable(path / name), message=reason)
        for name, reason in UNSUPPORTED_FILES.items()
        if name in tree.files or name in folders
    ]
    return missing + unsupported


def _text(path: Path, tree: Tree, name: str, findings: list[Finding]) -> str | None:
    """Return a small text file of the task, or None with a finding."""
    if name not in tree.files:
        return None
    place = printable(path / name)
    try:
        text = read_bytes(path / name, max_bytes=MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        findings.append(Finding(path=place, message=f"not UTF-8: byte {error.start} cannot be read"))
        return None
    except TaskError as error:
        findings.append(Finding(path=place, message=str(error).removeprefix(f"{place}: ")))
        return None
    if "\0" in text:
        findings.append(Finding(path=place, message="holds a NUL"))
        return None
    return text


def _task_file(path: Path, tree: Tree, findings: list[Finding]) -> TaskFile | None:
    text = _text(path, tree, "task.toml", findings)
    return None if text is None else parse_task_file(text, printable(path / "task.toml"), findings)


def _dockerfile(path: Path, tree: Tree, findings: list[Finding]) -> Dockerfile | None:
    text = _text(path, tree, "environment/Dockerfile", findings)
    if text is None:
        return None
    context = [name.removeprefix("environment/") for name in tree.files if name.startswith("environment/")]
    dockerfile = read_dockerfile(text, printable(path / "environment/Dockerfile"), context)
    findings += dockerfile.findings
    return dockerfile


def _workdir(path: Path, task_file: TaskFile | None, dockerfile: Dockerfile | None, findings: list[Finding]) -> str:
    written = task_file.environment.workdir if task_file else None
    if written is None:
        return (dockerfile.workdir if dockerfile else "") or DEFAULT_WORKDIR
    place = printable(path / "task.toml")
    findings += [
        Finding(path=place, field="environment.workdir", message=problem)
        for problem in workdir_problems(written, written)
    ]
    return written
