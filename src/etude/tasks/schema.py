"""`task.toml` of Harbor's schema 1.4: what is accepted, and what is known but refused.

Only what etude enforces is accepted. A field that Harbor knows and etude does not support is refused by its name
with the reason, because a task that is played without it would be another task.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, field_validator

from etude.learning_config import Section
from etude.problems import checked, explain
from etude.tasks.finding import Finding

DEFAULT_TIMEOUT_S = 600.0
"""What Harbor gives a verifier; given to an agent too, because no wait may be without an end."""

MAX_DOTS = 128

_TimeoutS = Annotated[float, Field(gt=0.0, le=86_400.0)]
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Author(Section):
    """Who wrote the task."""

    name: str
    email: str | None = None


class Package(Section):
    """`[task]`: the task's name in a registry."""

    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _org_and_name(cls, name: str) -> str:
        if not _PACKAGE_NAME.fullmatch(name) or ".." in name:
            msg = f"must be 'org/name' in letters, digits, '.', '_' and '-', got {name[:60]!r}"
            raise ValueError(msg)
        return name


class TaskEnvironment(Section):
    """`[environment]`: where the agent works."""

    network_mode: Literal["no-network"]
    """Required: Harbor takes an absent mode for `public`, and a sandbox has no network."""
    build_timeout_sec: _TimeoutS = DEFAULT_TIMEOUT_S
    os: Literal["linux"] = "linux"
    cpus: Annotated[float, Field(gt=0.0, le=256.0)] = 1.0
    memory_mb: Annotated[int, Field(ge=16, le=1 << 20)] = 512
    storage_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    env: dict[str, str] = Field(default={}, max_length=256)
    workdir: str | None = None

    @field_validator("env")
    @classmethod
    def _plain_values(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if problem := env_problem(name, value):
                raise ValueError(problem)
        return env


class TaskAgent(Section):
    """`[agent]`: the budget of the harness."""

    timeout_sec: _TimeoutS = DEFAULT_TIMEOUT_S
    user: Literal["agent"] = "agent"
    network_mode: Literal["no-network"] = "no-network"


class TaskVerifier(Section):
    """`[verifier]`: how the result is graded, always in a fresh sandbox of the same image."""

    timeout_sec: _TimeoutS = DEFAULT_TIMEOUT_S
    environment_mode: Literal["separate"] = "separate"
    network_mode: Literal["no-network"] = "no-network"


class TaskSolution(Section):
    """`[solution]`: nothing but the directory of that name."""


class TaskFile(Section):
    """The whole of `task.toml`."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"]
    task: Package | None = None
    metadata: dict[str, Any] = Field(default={})
    environment: TaskEnvironment
    agent: TaskAgent = TaskAgent()
    verifier: TaskVerifier = TaskVerifier()
    solution: TaskSolution = TaskSolution()
    source: str | None = None

    def facts(self) -> dict[str, str]:
        """Return `metadata` as text; nested values are JSON."""
        return {
            key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for key, value in self.metadata.items()
        }


UNSUPPORTED = {
    "steps": "multi-step tasks are not supported; make each step a task",
    "multi_step_reward_strategy": "multi-step tasks are not supported; make each step a task",
    "artifacts": "artifacts are not supported; a grader sees what changed in the workdir",
    "version": "this is the old name of schema_version; rename it",
    "environment.docker_image": "images are not pulled; describe the environment in environment/Dockerfile",
    "environment.gpus": "sandboxes have no accelerator",
    "environment.gpu_types": "sandboxes have no accelerator",
    "environment.tpu": "sandboxes have no accelerator",
    "environment.mcp_servers": "MCP servers are not supported; give the harness its tools",
    "environment.skills_dir": "skills are not supported; give them to the harness",
    "environment.healthcheck": "health checks are not supported; a sandbox is ready when it is made",
    "environment.allowed_hosts": "sandboxes have no network",
    "environment.allow_internet": "this was replaced in schema 1.3; write network_mode = 'no-network'",
    "environment.memory": "this was replaced; write memory_mb",
    "environment.storage": "this was replaced; write storage_mb",
    "agent.allowed_hosts": "sandboxes have no network",
    "verifier.allowed_hosts": "sandboxes have no network",
    "verifier.user": "the tests' user is not a choice of the task",
    "verifier.env": "environment variables of the tests are not supported; set them in tests/test.sh",
    "verifier.environment": "a separate verifier image is not supported; grading uses a fresh copy of the task's own",
    "verifier.collect": "collect commands run where the agent was; a grader sees what changed in the workdir",
    "solution.env": "environment variables of the solution are not supported; set them in solution/solve.sh",
}
"""Keys of Harbor's schema that etude refuses, with what to do instead."""


def parse_task_file(text: str, path: str, findings: list[Finding]) -> TaskFile | None:
    """Read the text of a `task.toml`; None, with every problem added to `findings`, when it does not hold."""
    # The parser's time grows with the square of a dotted key's length.
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        findings.append(Finding(path=path, message=f"has a line with more than {MAX_DOTS} dots; break it up"))
        return None
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        findings.append(Finding(path=path, message=f"not valid TOML: {error}"))
        return None
    unsupported = list(_take_unsupported(data, path))
    findings += unsupported
    try:
        task_file = checked(TaskFile, data)
    except ValidationError as error:
        findings += [Finding(path=path, field=item.key, message=item.message) for item in explain(error, TaskFile)]
    else:
        return None if unsupported else task_file
    return None


def env_problem(name: str, value: str) -> str:
    """Say why an environment variable of a task is refused; empty when it is not."""
    if not _ENV_NAME.fullmatch(name):
        return f"{name[:60]!r} is not a name of an environment variable"
    if "\0" in value:
        return f"the value of {name} holds a NUL"
    if "$" in value:
        return f"the value of {name} refers to other variables, which is not supported; write it out"
    return ""


def _take_unsupported(data: dict[str, Any], path: str) -> Iterator[Finding]:
    for key, reason in UNSUPPORTED.items():
        table, _, field = key.rpartition(".")
        section = data.get(table) if table else data
        # An empty list or table asks for nothing.
        if isinstance(section, dict) and cast("dict[str, Any]", section).pop(field, None) not in (None, [], {}):
            yield Finding(path=path, field=key, message=reason)
