"""The agent program: which files it is, and the command line that starts it."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from etude.config import HarnessSection
from etude.errors import HarnessError
from etude.types import Task

HARNESS_DIRECTORY = "/opt/harness"
"""Where the agent program lies inside every sandbox."""

MAX_HARNESS_BYTES = 64 << 20

_INSTRUCTION = "{instruction}"


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """An agent program, ready to be placed into a sandbox and started."""

    name: str
    command: tuple[str, ...]
    files: dict[str, bytes]
    """By absolute path inside the sandbox."""
    executable: frozenset[str] = frozenset()
    env: Mapping[str, str] = {}

    def command_for(self, task: Task) -> tuple[str, ...]:
        """Return program and arguments with the task's instruction put in."""
        return tuple(part.replace(_INSTRUCTION, task.instruction) for part in self.command)


def load_harness(section: HarnessSection) -> Harness:
    """Return the configured harness; raise `HarnessError` when its directory cannot be read or is too large."""
    root = Path(section.files) if section.files else _built_in()
    if not root.is_dir():
        msg = f"harness.files = {str(root)!r} is not a directory: name the directory that holds the agent program"
        raise HarnessError(msg)
    contents: dict[str, bytes] = {}
    executable: set[str] = set()
    total = 0
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_file() or "__pycache__" in path.parts:
            continue
        total += path.stat().st_size
        if total > MAX_HARNESS_BYTES:
            msg = f"harness.files = {str(root)!r} holds more than {MAX_HARNESS_BYTES >> 20} MiB: bake it into the image"
            raise HarnessError(msg)
        place = f"{HARNESS_DIRECTORY}/{path.relative_to(root).as_posix()}"
        contents[place] = path.read_bytes()
        if path.stat().st_mode & 0o100:
            executable.add(place)
    return Harness(
        name=root.name,
        command=section.command,
        files=contents,
        executable=frozenset(executable),
        env=section.env,
    )


def _built_in() -> Path:
    """Return the mini harness of the installed package, or of the checkout it was installed from."""
    installed = Path(str(files("etude"))) / "_harnesses" / "mini"
    return installed if installed.is_dir() else Path(str(files("etude"))).parents[1] / "harnesses" / "mini"
