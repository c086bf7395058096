"""The agent program: where its files are, and the command line that starts it."""

from importlib.resources import files
from pathlib import Path

from etude.config import HarnessSection
from etude.errors import HarnessError
from etude.types import Task

HARNESS_MOUNT = "/opt/harness"
"""Where every sandbox shows the harness's directory, read-only: environment backends are told to mount it."""

BUILT_IN = "mini"

COMPACTION_TRIGGER = "ETUDE_COMPACTION_TRIGGER_TOKENS"
"""Environment variable that tells a harness when to go on from a summary; absent when it is not to."""

_INSTRUCTION = "{instruction}"


def harness_name(section: HarnessSection) -> str:
    """Return what records call the agent program."""
    return Path(section.files).name if section.files else BUILT_IN


def harness_directory(section: HarnessSection) -> Path:
    """Return the directory to mount at `HARNESS_MOUNT`; raise `HarnessError` when there is none."""
    root = Path(section.files).absolute() if section.files else _built_in()
    if not root.is_dir():
        msg = f"harness.files = {str(root)!r} is not a directory: name the directory that holds the agent program"
        raise HarnessError(msg)
    return root


def harness_command(section: HarnessSection, task: Task) -> tuple[str, ...]:
    """Return program and arguments with the task's instruction put in."""
    return tuple(part.replace(_INSTRUCTION, task.instruction) for part in section.command)


def harness_variables(section: HarnessSection, *, url: str, key: str) -> dict[str, str]:
    """Return the harness's environment variables: the configured ones, where its model is, and when to compact."""
    trigger = section.compaction.trigger_tokens
    return {
        **section.env,
        **({COMPACTION_TRIGGER: str(trigger)} if trigger else {}),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        # Anthropic's clients add the version themselves.
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


def _built_in() -> Path:
    """Return the harness of the installed package, or of the checkout it was installed from."""
    package = Path(str(files("etude")))
    installed = package / "_harnesses" / BUILT_IN
    return installed if installed.is_dir() else package.parents[1] / "harnesses" / BUILT_IN
