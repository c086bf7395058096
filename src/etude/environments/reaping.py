"""Removing what a dead launcher, or a dead owner and its launcher, left on this host. Blocks: call it in a thread.

The living are never touched: what is removed is named by a lease that nobody holds, or by the caller's own lease.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from etude.environments import plain
from etude.environments.commands import kill_descendants
from etude.environments.launcher import ARGUMENTS
from etude.environments.lease import Lease, lease_directory, leases, reaper_waits, start_ticks

_LEAVES_BY_ITSELF_S = 5.0
"""What a launcher has, once its owner is dead, to remove everything itself."""
_KILL_S = 10.0
_PATIENCE_S = 0.05


def reap() -> list[str]:
    """Remove what dead owners left, and return the names of their backends; waits at most some 15 s for each."""
    directory = lease_directory()
    removed: list[str] = []
    with reaper_waits(directory):
        for lease, lives in leases():
            if not lives and remove_remains(lease):
                (directory / f"{lease.backend}.json").unlink(missing_ok=True)
                removed.append(lease.backend)
    return removed


def gone(sandboxes: set[str]) -> set[str]:
    """Remove what dead owners left, and return those of `sandboxes` that do not exist any more.

    `sandboxes` are names in a run's ledger, created and not destroyed. Those of a living owner are not returned: the
    run has another controller, on this host, that plays with them. One made on another host counts as gone: it ended
    when its owner's socket did.
    """
    reap()
    left = {lease.backend for lease, _ in leases()}
    return {name for name in sandboxes if name.rpartition("-")[0] not in left}


def remove_remains(lease: Lease) -> bool:
    """End the launcher and all sandboxes of a lease and remove what held them; False if that takes over 15 s."""
    deadline = monotonic() + _LEAVES_BY_ITSELF_S + _KILL_S
    if lease.is_local and lease.launcher and start_ticks(lease.launcher) == lease.launcher_started:
        _end(lease.launcher, patience_s=_LEAVES_BY_ITSELF_S)
    while not _removed(lease):
        if monotonic() > deadline:
            return False
        select.select([], [], [], _PATIENCE_S)
    return True


def _removed(lease: Lease) -> bool:
    """Kill what is left and remove what held it; False while something of it is still there."""
    for pid in {*_in_groups(lease), *_in_session(lease)}:
        kill_descendants(pid)
        _end(pid, patience_s=0.0)
    with contextlib.suppress(OSError):
        for root in plain.roots_of(lease.backend):
            plain.remove_root(str(root))
    emptied = [_remove_groups(Path(group)) for group in lease.groups]
    return all(emptied) and not plain.roots_of(lease.backend)


def _end(pid: int, *, patience_s: float) -> None:
    """Wait for the end of a process, kill it when patience is over, and wait again for a moment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        process = os.pidfd_open(pid)
        try:
            if not _ended(process, patience_s):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                _ended(process, _PATIENCE_S)
        finally:
            os.close(process)


def _ended(process: int, patience_s: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))


def _in_groups(lease: Lease) -> Iterator[int]:
    for group in lease.groups:
        for processes in Path(group).glob("*/cgroup.procs"):
            with contextlib.suppress(OSError):
                # A process of a pid namespace that this one does not see is 0.
                yield from (int(pid) for pid in processes.read_text().split() if pid != "0")


def _in_session(lease: Lease) -> Iterator[int]:
    """Yield first processes of sandboxes: they stay in the session of the launcher that they were forked from."""
    if not lease.is_local or not lease.launcher:
        return
    if start_ticks(lease.launcher) not in (0, lease.launcher_started):  # its number is somebody else's, with a session
        return
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            state, session, started = fields[0], int(fields[3]), int(fields[19])
            if session != lease.launcher or started < lease.launcher_started or state in "ZX":
                continue
            if (directory / "cmdline").read_bytes().startswith(ARGUMENTS):
                yield int(directory.name)


def _remove_groups(group: Path) -> bool:
    with contextlib.suppress(OSError):
        for directory in (*(path for path in group.iterdir() if path.is_dir()), group):
            with contextlib.suppress(OSError):
                directory.rmdir()
    return not group.exists()
