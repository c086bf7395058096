"""A directory on a small file system of its own, so that filling it hurts nobody else."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from etude.environments import syscalls
from etude.errors import HostError


@contextmanager
def small_disk(place: Path, *, megabytes: int) -> Generator[None]:
    """Give `place` a file system in memory for this process and those it starts; at the end its files are kept on disk.

    Raise `HostError` when this user may not mount.
    """
    place.mkdir(parents=True, exist_ok=True)
    below = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk = Path(f"/proc/self/fd/{below}")
        _mount(place, megabytes)
        try:
            shutil.copytree(disk, place, dirs_exist_ok=True)
            yield
        finally:
            shutil.copytree(place, disk, dirs_exist_ok=True)
    finally:
        os.close(below)


def _mount(place: Path, megabytes: int) -> None:
    try:
        # A mount namespace of its own: nobody else sees the mount, and it goes away with the last process.
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("etude-chaos", str(place), "tmpfs", options=f"size={megabytes}m")
    except OSError as error:
        msg = f"cannot mount a small file system at {place} ({error.strerror}): run as root, or without --full-disks"
        raise HostError(msg) from error
