"""Leases: which sandboxes of this host belong to whom, and whether their owner lives.

A lease is a small file that its owner keeps locked. The kernel drops the lock when the owner dies, however it dies: no
clock, no heartbeat, no process number that somebody else has by now. It is written once per launcher, never per
sandbox: which sandboxes live is read from the launcher's children.
"""

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from etude.environments.cgroups import group_directories
from etude.errors import SandboxError

_PARENTS = ("/dev/shm", "/tmp")
_MAX_BYTES = 1 << 16
_PAGE = 4096


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One backend, as another process of this host finds it."""

    backend: str
    """Names of its sandboxes begin with this and a dash."""
    run: str = ""
    """What the sandboxes are for; empty outside of a run."""
    owner: int
    launcher: int = 0
    """Process whose children are the sandboxes' first processes; 0 before there is one."""
    launcher_started: int = 0
    """Clock ticks from the host's start to the launcher's: both numbers together name a process for good."""
    groups: tuple[str, ...] = ()
    """Directories that hold the sandboxes' control groups, where they exist."""
    boot: str
    pid_namespace: str

    @property
    def is_local(self) -> bool:
        """Whether the numbers of processes mean here and now what they meant to the owner."""
        return (self.boot, self.pid_namespace) == (this_boot(), this_pid_namespace())


class HeldLease:
    """A lease whose owner is this process."""

    def __init__(self, lease: Lease) -> None:
        """Take the lease; raise `SandboxError` when it cannot be written."""
        directory = lease_directory()
        self.path = directory / f"{lease.backend}.json"
        try:
            with reaper_waits(directory):  # who would take a file without a lock for that of a dead owner
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write(lease)
        except OSError as error:
            msg = f"cannot write {self.path}, which says whose sandboxes these are: {error}; make room there"
            raise SandboxError(msg) from error

    def update(self, *, launcher: int) -> None:
        """Say which process is the launcher now."""
        self._write(msgspec.structs.replace(self.lease, launcher=launcher, launcher_started=start_ticks(launcher)))

    def _write(self, lease: Lease) -> None:
        self.lease = lease
        # One write of the whole: a kill falls before or after it.
        os.pwrite(self._file, msgspec.json.encode(lease).ljust(_PAGE), 0)

    def release(self) -> None:
        """Remove the lease: nothing of what it speaks is left."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def lease_of_this_process(backend: str, *, run: str) -> Lease:
    """Return a lease that is to be held."""
    return Lease(
        backend=backend,
        run=run,
        owner=os.getpid(),
        groups=group_directories(backend),
        boot=this_boot(),
        pid_namespace=this_pid_namespace(),
    )


def lease_directory() -> Path:
    """Return where this user's leases lie, made when missing. Raise `SandboxError` when it is somebody else's."""
    parent = next((path for path in _PARENTS if os.access(path, os.W_OK)), _PARENTS[-1])
    directory = Path(parent, f"etude-sandboxes-{os.geteuid()}")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        msg = f"cannot make {directory}, where it is noted whose sandboxes live: {error}; make room there"
        raise SandboxError(msg) from error
    if directory.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        msg = f"{directory} belongs to another user or can be written by one; remove it"
        raise SandboxError(msg)
    return directory


@contextlib.contextmanager
def reaper_waits(directory: Path) -> Generator[None]:
    """Let nobody else create or remove leases during the block; waits for whoever does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def leases() -> list[tuple[Lease, bool]]:
    """Return the leases of this user on this host, each with whether its owner lives."""
    found: list[tuple[Lease, bool]] = []
    for path in sorted(lease_directory().glob("*.json")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # removed since
            continue
        with os.fdopen(descriptor, "rb") as file, contextlib.suppress(msgspec.DecodeError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                lives = False
            except BlockingIOError:
                lives = True
            found.append((msgspec.json.decode(file.read(_MAX_BYTES), type=Lease), lives))
    return found


def this_boot() -> str:
    """Return what names the time since this host was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def this_pid_namespace() -> str:
    """Return what names the space that this process's numbers of processes are from."""
    return str(Path("/proc/self/ns/pid").readlink())


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the host did; 0 when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
