"""Running one command inside a sandbox, from its first process. Standard library only."""

import contextlib
import math
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

_CHUNK = 1 << 16
_NOT_FOUND = 127
_EXPENDABLE = b"500"
"""Added to the out-of-memory score of commands, so that the kernel ends them and not the sandbox's first process."""


class Command(NamedTuple):
    """What to run."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    user_id: int | None
    """Number of the user and group to become; None stays what the sandbox's first process is."""
    timeout_s: float
    max_output_bytes: int
    """Of stdout and of stderr, each."""


class Ending:
    """How it ended."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.timed_out = False
        self.truncated = False
        self.out_of_memory = False
        self.seconds = 0.0


class Runner:
    """Runs commands one after the other; when one is over, so is every process that it left."""

    def __init__(self, stream: socket.socket, *, alone: bool, memory_events: int) -> None:
        """Run commands for the owner at the other end of a socket.

        Args:
            stream: The socket; its end is the end of everything.
            alone: Whether this process is the first of its own pid namespace.
            memory_events: Descriptor of the file that counts what the memory limit did; -1 without a limit.
        """
        self._stream = stream
        self._alone = alone
        self._memory_events = memory_events

    def run(self, command: Command) -> Ending:
        """Run a command to its end or deadline."""
        started = time.monotonic()
        killed_before = self._killed_by_limit()
        ending = Ending()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            pid = _spawn(command, out_write, err_write)
        except (OSError, ValueError) as error:
            pid = 0
            ending.exit_code = _NOT_FOUND
            ending.stderr += f"cannot run {command.argv[:1]} in {command.cwd!r}: {error}\n".encode()
        os.close(out_write)
        os.close(err_write)
        if pid:
            process = os.pidfd_open(pid)
            self._collect(ending, {out_read: ending.stdout, err_read: ending.stderr}, process, command, started)
            os.close(process)
            ending.exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._reap()
        os.close(out_read)
        os.close(err_read)
        ending.out_of_memory = self._killed_by_limit() > killed_before
        ending.seconds = time.monotonic() - started
        return ending

    def _collect(
        self, ending: Ending, outputs: dict[int, bytearray], process: int, command: Command, started: float
    ) -> None:
        poll = select.poll()
        for descriptor in (*outputs, process, self._stream.fileno()):
            poll.register(descriptor, select.POLLIN)
        waiting = {*outputs, process}
        deadline = started + command.timeout_s
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0 and not ending.timed_out and process in waiting:
                ending.timed_out = True
                self._kill_all()
            patience = None if process not in waiting or ending.timed_out else max(0, math.ceil(left * 1000))
            for descriptor, _ in poll.poll(patience):
                if descriptor == self._stream.fileno():
                    # Nothing is sent to a busy sandbox: its owner has gone, and so goes the sandbox.
                    self._kill_all()
                    os._exit(1)
                elif descriptor == process:
                    self._kill_all()
                elif chunk := os.read(descriptor, _CHUNK):
                    room = command.max_output_bytes - len(outputs[descriptor])
                    outputs[descriptor] += chunk[: max(0, room)]
                    ending.truncated |= len(chunk) > room
                    continue
                poll.unregister(descriptor)
                waiting.discard(descriptor)

    def _killed_by_limit(self) -> int:
        """How often so far the sandbox had more memory than it may, and processes were killed for it."""
        if self._memory_events < 0:
            return 0
        counts = dict(line.split(b" ", 1) for line in os.pread(self._memory_events, _CHUNK, 0).splitlines())
        return int(counts.get(b"oom") or counts.get(b"oom_kill") or 0)

    def _kill_all(self) -> None:
        if self._alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            kill_descendants(os.getpid())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                self._kill_all()
                os.waitpid(-1, 0)


def kill_descendants(ancestor: int) -> None:
    """Kill every process below one, new ones included, where no pid namespace does it.

    Works because the ancestor adopts orphans (PR_SET_CHILD_SUBREAPER), so that none can leave the tree.
    """
    killed: set[int] = set()
    while fresh := _descendants(ancestor) - killed:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= fresh


def children_of(pid: int) -> set[int]:
    """Return the processes whose parent this one is, ended ones included until it has taken note of them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found |= {int(child) for child in children.read_text().split()}
    return found


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    pending = [pid]
    while pending:
        fresh = children_of(pending.pop()) - found
        found |= fresh
        pending += fresh
    return found


def _spawn(command: Command, out: int, err: int) -> int:
    """Start the command and return its process number. Raise `OSError` when it cannot be started.

    posix_spawn shares this process's memory until the program is loaded, which costs a fifth of a fork. What it cannot
    do is done here before and undone after: the directory, and the real user, which the new process then is for good
    (RESETIDS makes the effective user the real one, and loading a program forgets the saved one with all privileges).
    """
    os.chdir(command.cwd)
    try:
        if command.user_id is not None:
            os.setresgid(command.user_id, -1, -1)
            os.setresuid(command.user_id, -1, -1)
        pid = os.posix_spawn(
            _find(command.argv[0], command.env["PATH"]),
            command.argv,
            command.env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out, 1),
                (os.POSIX_SPAWN_DUP2, err, 2),
            ],
            resetids=command.user_id is not None,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ],
        )
    finally:
        if command.user_id is not None:
            os.setresuid(os.geteuid(), -1, -1)
            os.setresgid(os.getegid(), -1, -1)
        os.chdir("/")
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_bytes(_EXPENDABLE)
    return pid


def _find(program: str, search_path: str) -> str:
    if "/" in program:
        return program
    for folder in search_path.split(":"):
        candidate = f"{folder}/{program}"
        if os.access(candidate, os.X_OK) and not Path(candidate).is_dir():
            return candidate
    raise FileNotFoundError(f"no program {program!r} in {search_path}")
