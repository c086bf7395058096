"""The pristine environment of a task, read from its Dockerfile.

The local backend builds no images: it knows the instructions that only place files and set values, and refuses the
others by file and line. FROM names nothing here: the host's own programs are what a sandbox finds. The history of a
repository is left out wherever it lies, because it may hold the solution.
"""

import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NoReturn

import msgspec

from etude.errors import TaskError
from etude.types import Task

_MAX_FILES = 10_000
_MAX_DOCKERFILE_BYTES = 1 << 20
_UNPACKED_BY_ADD = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zip")
_HISTORY = ".git"
_RESERVED = ("/", "/tests", "/logs")


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is there before the agent starts."""

    path: str
    """Absolute, inside the sandbox."""
    content: bytes
    executable: bool = False


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """What a fresh sandbox of a task holds."""

    files: tuple[ImageFile, ...] = ()
    env: dict[str, str] = {}


def read_image(task: Task) -> Image:
    """Read `environment/` of a task.

    Raises:
        TaskError: The Dockerfile is missing, asks for what the local backend cannot do, or a COPY leaves its context.
    """
    context = Path(task.path, "environment")
    dockerfile = context / "Dockerfile"
    if not dockerfile.is_file():
        msg = f"{dockerfile}: not found; the local backend reads a task's environment from it"
        raise TaskError(msg)
    if dockerfile.stat().st_size > _MAX_DOCKERFILE_BYTES:
        msg = f"{dockerfile}: larger than {_MAX_DOCKERFILE_BYTES} bytes"
        raise TaskError(msg)
    if task.workdir in _RESERVED or not task.workdir.startswith("/"):
        msg = f"{task.path}: workdir {task.workdir!r} must be an absolute path other than {', '.join(_RESERVED)}"
        raise TaskError(msg)
    return _Reader(context, task).read(dockerfile)


class _Reader:
    """Follows a Dockerfile from top to bottom."""

    def __init__(self, context: Path, task: Task) -> None:
        self._context = context
        self._left = task.storage_mb << 20
        self._workdir = PurePosixPath("/")
        self._env: dict[str, str] = {}
        self._files: dict[str, ImageFile] = {}
        self._place = ""

    def read(self, dockerfile: Path) -> Image:
        started = False
        for number, line in _logical_lines(dockerfile.read_text(errors="replace")):
            self._place = f"{dockerfile}:{number}"
            name, _, rest = line.partition(" ")
            name, rest = name.upper(), rest.strip()
            if (name == "FROM") == started:
                self._refuse("the first instruction, and only that one, must be FROM")
            started = True
            self._follow(name, rest)
        return Image(files=tuple(self._files.values()), env=self._env)

    def _follow(self, name: str, rest: str) -> None:
        if name in {"FROM", "USER"}:
            # The host's programs stand for any image, and commands say themselves whether they run as agent or root.
            return
        if "$" in rest:
            self._refuse(f"{name} with a variable cannot be followed by the local backend; write the value out")
        match name:
            case "WORKDIR":
                self._workdir = self._resolve(rest)
            case "ENV":
                self._env |= self._assignments(rest)
            case "COPY" | "ADD":
                self._copy(name, self._operands(rest))
            case _:
                self._refuse(
                    f"the local backend cannot build images, so {name} is not possible; use FROM, WORKDIR, "
                    "COPY, ADD of plain files, ENV and USER, or a backend that builds"
                )

    def _assignments(self, rest: str) -> dict[str, str]:
        words = self._split(rest)
        if words and "=" not in words[0]:
            return {words[0]: " ".join(words[1:])}
        pairs = [word.partition("=") for word in words]
        if not all(name and middle for name, middle, _ in pairs):
            self._refuse("ENV needs NAME=value pairs")
        return {name: value for name, _, value in pairs}

    def _operands(self, rest: str) -> list[str]:
        if not rest.startswith("["):
            return self._split(rest)
        try:
            return msgspec.convert(json.loads(rest), list[str])
        except (ValueError, msgspec.ValidationError):
            self._refuse("not a list of strings")

    def _split(self, rest: str) -> list[str]:
        try:
            return shlex.split(rest)
        except ValueError as error:
            self._refuse(str(error))

    def _copy(self, name: str, operands: list[str]) -> None:
        words = [word for word in operands if not word.startswith("--chown=")]
        if any(word.startswith("--") for word in words):
            self._refuse(f"{name} knows only the option --chown here")
        *sources, destination = words or [""]
        if not sources:
            self._refuse(f"{name} needs a source and a destination")
        target = self._resolve(destination)
        into = destination.endswith(("/", "/.")) or destination == "." or len(sources) > 1
        for source in sources:
            if "://" in source or (name == "ADD" and source.endswith(_UNPACKED_BY_ADD)):
                self._refuse(f"{name} of {source!r}: only plain files of the context")
            self._place_source(source, target, into=into)

    def _place_source(self, source: str, target: PurePosixPath, *, into: bool) -> None:
        relative = PurePosixPath(source.lstrip("/"))
        if ".." in relative.parts:
            self._refuse(f"{source!r} leaves the directory environment/")
        path = self._context / relative
        if _HISTORY in relative.parts:
            self._refuse(f"{source!r} is a repository's history, which may hold the solution; copy the files only")
        if any(part.is_symlink() for part in (path, *path.parents) if part.is_relative_to(self._context)):
            self._refuse(f"{source!r} is or passes a symbolic link")
        if path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = [name for name in folders if name != _HISTORY]
                names[:] = [name for name in names if name != _HISTORY]
                # A link to a directory counts as a file here, to be refused and not to be left out.
                for name in sorted((*names, *(name for name in folders if Path(folder, name).is_symlink()))):
                    file = Path(folder, name)
                    self._add(file, target / file.relative_to(path).as_posix())
        elif path.is_file():
            self._add(path, target / path.name if into else target)
        else:
            self._refuse(f"{source!r} does not exist in environment/")

    def _add(self, file: Path, target: PurePosixPath) -> None:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            self._refuse(f"{file.name!r} is not a regular file")
        self._left -= status.st_size
        if self._left < 0 or len(self._files) >= _MAX_FILES:
            self._refuse("the files do not fit into the task's storage_mb")
        executable = bool(status.st_mode & stat.S_IXUSR)
        self._files[str(target)] = ImageFile(path=str(target), content=file.read_bytes(), executable=executable)

    def _resolve(self, text: str) -> PurePosixPath:
        if not text or ".." in PurePosixPath(text).parts:
            self._refuse(f"{text!r} is not a path that can be followed")
        return self._workdir / text

    def _refuse(self, reason: str) -> NoReturn:
        msg = f"{self._place}: {reason}"
        raise TaskError(msg)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, instruction) with comments dropped and continued lines joined."""
    held, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start if held else number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        yield start, held + line
        held = ""
    if held:
        yield start, held
