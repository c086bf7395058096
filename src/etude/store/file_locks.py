"""Locks of files, which the kernel frees when their holder dies."""

import errno
import fcntl
import os
from pathlib import Path

from etude.errors import HostError

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What Lustre and NFS answer when they are mounted without locks."""


def try_lock(descriptor: int, place: Path) -> bool:
    """Take an open file's lock and return True, or False when another process has it.

    Raise `HostError`, which names `place`, when its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        msg = (
            f"the file system of {place} has no locks ({error.strerror}), so two processes could write at once; "
            f"mount it with locks (Lustre: -o flock), or choose another directory"
        )
        raise HostError(msg) from error
    return True


def holder_of(descriptor: int, place: Path) -> str:
    """Return which process has the lock of an open file and what to do about it, as far as the kernel tells."""
    inode = os.fstat(descriptor).st_ino
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        rows = []
    found = [row[4] for row in rows if row[1:2] == ["FLOCK"] and row[5].rpartition(":")[2] == str(inode)]
    if not found or found[0] in ("0", "-1"):
        return f"another process; `fuser {place}` may name it: end it"
    if _is_stopped(found[0]):
        return f"process {found[0]}, which is stopped: let it go on with `kill -CONT {found[0]}`, or end it"
    return f"process {found[0]}: see what it waits for, or end it"


def _is_stopped(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
