"""A task directory's files, read without trusting them: no link is followed and everything is bounded."""

import hashlib
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from etude.errors import TaskError
from etude.tasks.finding import Finding, printable

MAX_FILES = 10_000
MAX_FILE_BYTES = 64 << 20
MAX_TREE_BYTES = 256 << 20
MAX_PATH_BYTES = 1024


class TreeFile(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file."""

    num_bytes: int
    executable: bool
    sha256: str


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """The regular files of a directory by `/`-separated relative path, sorted."""

    files: dict[str, TreeFile]
    findings: tuple[Finding, ...]
    """Whatever was left out, and why."""

    def digest(self) -> str:
        """Return a sha256 over all relative paths and bytes."""
        total = hashlib.sha256()
        for name, file in self.files.items():
            total.update(f"{len(name.encode())}:{name}{file.sha256}".encode())
        return total.hexdigest()


def read_tree(root: Path) -> Tree:
    """List and hash the files below a directory.

    Raises:
        TaskError: When it holds more files or bytes than any task should.
    """
    files: dict[str, TreeFile] = {}
    findings: list[Finding] = []
    total_bytes = 0
    for path, info in _entries(root):
        name = path.relative_to(root).as_posix()
        if problem := _unsafe(name, info):
            findings.append(Finding(path=printable(path), message=problem))
        elif stat.S_ISREG(info.st_mode):
            total_bytes += info.st_size
            if total_bytes > MAX_TREE_BYTES:
                raise TaskError(
                    f"{printable(root)}: more than {MAX_TREE_BYTES} bytes in all; fetch large data elsewhere"
                )
            files[name] = TreeFile(
                num_bytes=info.st_size,
                executable=bool(info.st_mode & stat.S_IXUSR),
                sha256=hashlib.sha256(read_bytes(path, max_bytes=MAX_FILE_BYTES)).hexdigest(),
            )
    return Tree(files=dict(sorted(files.items())), findings=tuple(findings))


def _entries(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything below a directory; directories with unsafe names are not entered."""
    pending = [root]
    count = 0
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as listing:
                listed = islice(listing, MAX_FILES + 1)
                found = [(folder / entry.name, entry.stat(follow_symlinks=False)) for entry in listed]
        except OSError as error:
            raise TaskError(f"{printable(folder)}: {error.strerror}") from error
        count += len(found)
        if count > MAX_FILES:
            raise TaskError(f"{printable(root)}: more than {MAX_FILES} files; a task directory holds one small problem")
        for path, info in found:
            if stat.S_ISDIR(info.st_mode) and not _unsafe(path.relative_to(root).as_posix(), info):
                pending.append(path)
            yield path, info


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Read a regular file that is not reached through a link in its last component.

    Raises:
        TaskError: When it is something else, unreadable, or larger than `max_bytes`.
    """
    try:
        # Not blocking, in case a pipe was put there since the directory was listed.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TaskError(f"{printable(path)}: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise TaskError(f"{printable(path)}: not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TaskError(f"{printable(path)}: larger than {max_bytes} bytes")
    return data


def _unsafe(name: str, info: os.stat_result) -> str:
    """Say why an entry is refused; empty when it is not."""
    if not name.isprintable():
        return "its name has control characters or is not UTF-8; rename it"
    if len(name.encode()) > MAX_PATH_BYTES:
        return f"its path is longer than {MAX_PATH_BYTES} bytes; rename it"
    if stat.S_ISLNK(info.st_mode):
        # Even a link that stays inside could carry tests into the image.
        return "symbolic links are refused in tasks; put a copy of the file there"
    if stat.S_ISDIR(info.st_mode):
        return ""
    if not stat.S_ISREG(info.st_mode):
        return "not a regular file; devices, pipes and sockets are refused"
    if info.st_size > MAX_FILE_BYTES:
        return f"larger than {MAX_FILE_BYTES} bytes; fetch large data elsewhere"
    return ""
