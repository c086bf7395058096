"""Control groups that hold sandboxes to memory, processes and CPU, version 1 or 2. Standard library only.

Nothing is assumed: a controller counts as usable when a group could be made and its limit file is there. Groups are
made below the one the backend runs in, so that its own limits keep holding for the sandboxes.
"""

import contextlib
import os
from pathlib import Path

_PREFIX = "etude-sandboxes-"
"""Followed by the name of the backend, whose lease says whether its owner lives."""
_CPU_PERIOD_US = 100_000
_TRIAL_LIMIT = "67108864"
"""Accepted by each of the limit files, and kept as it is by memory's, which rounds to pages."""
_LIMIT_FILES = {
    1: {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"},
    2: {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"},
}
_MEMORY_EVENTS = {1: "memory.oom_control", 2: "memory.events"}


class ControlGroups:
    """Makes and removes one group per sandbox and controller, through directory descriptors opened at the start."""

    def __init__(self, backend: str) -> None:
        self._name = f"{_PREFIX}{backend}"
        self._directories: dict[str, tuple[int, int]] = {}
        self._busy: set[tuple[int, str]] = set()
        for controllers, version, base in _hierarchies():
            with contextlib.suppress(OSError):
                self._adopt(controllers, version, base)

    def _adopt(self, controllers: frozenset[str], version: int, base: Path) -> None:
        own = base / self._name
        own.mkdir(exist_ok=True)  # an earlier launcher of this backend may have left it
        if version != 1:
            for directory in (base, own):
                _enable(directory, controllers)
        limits = _LIMIT_FILES[version]
        new = controllers & limits.keys() - self._directories.keys()
        usable = [name for name in new if _has_limit(own, limits[name])]
        if not usable:
            own.rmdir()
            return
        descriptor = os.open(own, os.O_PATH | os.O_DIRECTORY)
        self._directories |= dict.fromkeys(usable, (version, descriptor))

    @property
    def controllers(self) -> frozenset[str]:
        """Those of memory, pids and cpu that can be limited on this host."""
        return frozenset(self._directories)

    def create(self, name: str, *, memory_bytes: int, pids: int, cpus: float) -> None:
        """Make the groups of one sandbox. Raise `OSError` when a limit cannot be set."""
        quota = max(1000, int(cpus * _CPU_PERIOD_US))
        for descriptor in self._descriptors():
            os.mkdir(name, dir_fd=descriptor)
        for controller, (version, descriptor) in self._directories.items():
            value = {"memory": str(memory_bytes), "pids": str(pids), "cpu": str(quota)}[controller]
            if controller == "cpu" and version != 1:
                value = f"{quota} {_CPU_PERIOD_US}"
            _write(descriptor, f"{name}/{_LIMIT_FILES[version][controller]}", value)
            if controller == "memory" and version != 1:
                with contextlib.suppress(OSError):  # a kernel without swap accounting has nothing to limit
                    _write(descriptor, f"{name}/memory.swap.max", "0")

    def enter(self, name: str, pid: int) -> None:
        """Put a process, which has no children yet, into its groups."""
        for descriptor in self._descriptors():
            _write(descriptor, f"{name}/cgroup.procs", str(pid))

    def memory_events(self, name: str) -> int:
        """Open the file that counts what the memory limit of a sandbox did; -1 where there is no such limit."""
        if "memory" not in self._directories:
            return -1
        version, descriptor = self._directories["memory"]
        return os.open(f"{name}/{_MEMORY_EVENTS[version]}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=descriptor)

    def remove(self, name: str) -> None:
        """Remove the groups of a sandbox whose processes are gone; what the kernel still holds goes with the next."""
        self._busy |= {(descriptor, name) for descriptor in self._descriptors()}
        for descriptor, group in tuple(self._busy):
            try:
                os.rmdir(group, dir_fd=descriptor)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self._busy.discard((descriptor, group))

    def close(self) -> None:
        """Remove the groups that held the others."""
        for descriptor in self._descriptors():
            for group in Path(f"/proc/self/fd/{descriptor}").iterdir():
                with contextlib.suppress(OSError):
                    os.rmdir(group.name, dir_fd=descriptor)
            with contextlib.suppress(OSError):
                above = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=descriptor)
                os.rmdir(self._name, dir_fd=above)
                os.close(above)

    def _descriptors(self) -> set[int]:
        return {descriptor for _, descriptor in self._directories.values()}


def group_directories(backend: str) -> tuple[str, ...]:
    """Return every directory in which a launcher of this process's may make groups."""
    with contextlib.suppress(OSError):
        return tuple(str(base / f"{_PREFIX}{backend}") for _, _, base in _hierarchies())
    return ()


def _hierarchies() -> list[tuple[frozenset[str], int, Path]]:
    """Controllers, version and directory of the group this process is in, per hierarchy."""
    mounts: dict[str, tuple[int, str, Path]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        root, point = fields.split()[3:5]
        if kind == "cgroup2":
            mounts[""] = (2, root, Path(point))
        elif kind == "cgroup":
            mounts.update({name: (1, root, Path(point)) for name in options.split(",")})
    found: list[tuple[frozenset[str], int, Path]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        controllers = frozenset(names.split(",")) if names else frozenset(("memory", "pids", "cpu"))
        version, root, point = mounts.get(names.split(",")[0], (0, "/", Path()))
        if version and path.startswith(root) and controllers & _LIMIT_FILES[1].keys():
            own = point / path[len(root) :].lstrip("/")
            found.append((controllers, version, own))
            if version != 1 and own != point:
                # A group with processes in it cannot pass controllers on; the one above it may.
                found.append((controllers, version, own.parent))
    return found


def _enable(directory: Path, controllers: frozenset[str]) -> None:
    for name in sorted(controllers):
        with contextlib.suppress(OSError):
            (directory / "cgroup.subtree_control").write_text(f"+{name}")


def _has_limit(own: Path, file: str) -> bool:
    """Whether a limit can be set in a group made here, and is then the one that was set."""
    trial = own / "trial"
    trial.mkdir()
    try:
        (trial / file).write_text(_TRIAL_LIMIT)
        return (trial / file).read_text().split()[0] == _TRIAL_LIMIT
    except OSError:
        return False
    finally:
        trial.rmdir()


def _write(directory: int, path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
