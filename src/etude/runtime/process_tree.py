"""The processes below one, read from /proc: what a run has started, whoever of them has died."""

from collections import defaultdict
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A running process."""

    pid: int
    parent: int
    command: tuple[str, ...]


def descendants(pid: int) -> list[Process]:
    """Return the processes below `pid`, children before grandchildren; zombies are left out."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (process := _read(int(entry.name))) is not None:
            children[process.parent].append(process)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children[waiting.pop(0)]
        found += below
        waiting += [process.pid for process in below]
    return found


def _read(pid: int) -> Process | None:
    """Return a process; None when it is gone or only waits to be reaped."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold anything, brackets too.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    words = tuple(word.decode("utf-8", "replace") for word in command.rstrip(b"\0").split(b"\0"))
    return Process(pid=pid, parent=int(fields[1]), command=words)
