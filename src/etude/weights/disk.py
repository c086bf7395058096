"""The few steps by which files change, so that a test can end the process between any two of them, or within one."""

import contextlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Disk(Protocol):
    """Changes files. Each call may be the last one that happens."""

    def write(self, path: Path, data: bytes | memoryview, *, at: int = 0) -> None:
        """Write bytes into a file, which is created if need be; they may be lost until `sync`."""
        ...

    def sync(self, path: Path) -> None:
        """Return when what was written to the file, or which names are in the directory, survives a power failure."""
        ...

    def replace(self, path: Path, target: Path) -> None:
        """Give a file another name in one step, in place of what had it; lasting on return."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is nothing to do."""
        ...


class LocalDisk:
    """The machine's own."""

    def write(self, path: Path, data: bytes | memoryview, *, at: int = 0) -> None:
        """Write bytes into a file. Raise `OSError`, such as a full disk, with a part of them written."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            rest = memoryview(data)
            while rest.nbytes:
                written = os.pwrite(descriptor, rest, at)
                at += written
                rest = rest[written:]
        finally:
            os.close(descriptor)

    def sync(self, path: Path) -> None:
        """Flush a file or directory to the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, path: Path, target: Path) -> None:
        """Rename, and flush the directory."""
        path.replace(target)
        self.sync(target.parent)
        if path.parent != target.parent:
            self.sync(path.parent)

    def remove(self, path: Path) -> None:
        """Unlink."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def write_whole(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file so that it is seen whole or not at all, and stays."""
    staged = path.with_name(f".{path.name}.new")
    disk.remove(staged)
    disk.write(staged, data)
    disk.sync(staged)
    disk.replace(staged, path)
