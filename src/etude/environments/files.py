"""Reading and writing a sandbox's files from its first process. Standard library only.

Every path is resolved below the sandbox's root by the kernel (openat2) and never through a symbolic link. No command
runs meanwhile.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

from etude.environments import syscalls

_MAX_ENTRIES = 100_000
_DIRECTORY = os.O_PATH | os.O_DIRECTORY


class Files:
    """Files below a root directory."""

    def __init__(self, root: str) -> None:
        self._root = os.open(root, _DIRECTORY)

    def write(self, path: str, content: bytes, mode: int) -> None:
        """Put a regular file at `path`, instead of whatever is there; what was executable stays so.

        It belongs to the owner of its directory; missing directories are made with the owner of theirs.
        """
        parent, _, name = path.strip("/").rpartition("/")
        directory = self.make_directory(parent)
        try:
            with contextlib.suppress(FileNotFoundError):
                replaced = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
                mode |= replaced & 0o111 if stat.S_ISREG(replaced) else 0
                os.unlink(name, dir_fd=directory)
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                owner = os.fstat(directory)
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
                os.fchmod(descriptor, mode)
        finally:
            os.close(directory)

    def give_directory(self, path: str, owner: int | None) -> None:
        """Make a directory when missing, and let it belong to `owner`, if that is a number."""
        directory = self.make_directory(path.strip("/"))
        try:
            if owner is not None:
                os.chown(".", owner, owner, dir_fd=directory)
        finally:
            os.close(directory)

    def make_directory(self, path: str) -> int:
        """Return a descriptor of the directory, made when missing."""
        try:
            return syscalls.openat2(self._root, path or ".", _DIRECTORY)
        except FileNotFoundError:
            parent, _, name = path.rpartition("/")
            above = self.make_directory(parent)
        try:
            os.mkdir(name, 0o755, dir_fd=above)
            owner = os.fstat(above)
            os.chown(name, owner.st_uid, owner.st_gid, dir_fd=above, follow_symlinks=False)
        finally:
            os.close(above)
        return syscalls.openat2(self._root, path, _DIRECTORY)

    def read(self, path: str, max_bytes: int, known: dict[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
        """Return the regular files below a directory that differ from `known`, and the known ones that are gone.

        Args:
            path: A directory, or a file, which is then returned under its own name.
            max_bytes: Of all contents returned.
            known: Contents by path relative to `path`; such a file is left out while it has them.

        Raises:
            OSError: The path does not exist, leads through a symbolic link, or is nested too deep.
            ValueError: There is more than `max_bytes`, or there are too many entries.
        """
        path = path.strip("/") or "."
        changed: dict[str, bytes] = {}
        gone = dict(known)
        left = max_bytes
        for relative, full in self._walk(path):
            before = gone.pop(relative, None)
            content = self._content(full, left, -1 if before is None else len(before))
            if content is None or content == before:
                continue
            left -= len(content)
            if left < 0:
                msg = f"more than {max_bytes} bytes below /{path}"
                raise ValueError(msg)
            changed[relative] = content
        return changed, sorted(gone)

    def _walk(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield (path relative to `path`, path from the root) of everything that may be a file."""
        descriptor = syscalls.openat2(self._root, path, os.O_PATH)
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        if not is_directory:
            yield path.rpartition("/")[2], path
            return
        pending, entries = [""], 0
        while pending:
            folder = pending.pop()
            descriptor = syscalls.openat2(self._root, f"{path}/{folder}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(descriptor) as found:
                    for entry in found:
                        entries += 1
                        if entries > _MAX_ENTRIES:
                            msg = f"more than {_MAX_ENTRIES} entries below /{path}"
                            raise ValueError(msg)
                        relative = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(relative)
                        elif entry.is_file(follow_symlinks=False) and _is_unicode(relative):
                            yield relative, f"{path}/{relative}"
            finally:
                os.close(descriptor)

    def _content(self, path: str, limit: int, known_size: int) -> bytes | None:
        """Return a regular file's bytes, at most one more than `limit` unless it has the known size."""
        descriptor = syscalls.openat2(self._root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            return file.read(known_size if status.st_size == known_size else limit + 1)


def _is_unicode(name: str) -> bool:
    """Whether a name is UTF-8, as all names of a task and a message are."""
    return not any("\udc80" <= character <= "\udcff" for character in name)
