"""Running one command inside a sandbox, from its first process. Standard library only."""

import contextlib
import math
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK = 1 << 16
_NOT_FOUND = 127
_EXPENDABLE = b"500"
"""Added to the out-of-memory score of commands, so that the kernel ends them and not the sandbox's first process."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    user_id: int | None
    """Number of the user and group to become; None stays what the sandbox's first process is."""
    timeout_s: float
    max_output_bytes: int
    """Of stdout and of stderr, each."""


@dataclass(slots=True)
class Ending:
    """How it ended."""

    exit_code: int = 0
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0


class Runner:
    """Runs commands one after the other; when one is over, so is every process that it left."""

    def __init__(self, stream: socket.socket, *, alone: bool) -> None:
        """`alone` says that this process is the first of its own pid namespace."""
        self._stream = stream
        self._alone = alone

    def run(self, command: Command) -> Ending:
        """Run a command to its end or deadline."""
        started = time.monotonic()
        ending = Ending()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        status_read, status_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become(command, out_write, err_write, status_write)
        for descriptor in (out_write, err_write, status_write):
            os.close(descriptor)
        problem = os.read(status_read, _CHUNK)
        os.close(status_read)
        if not problem:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_bytes(_EXPENDABLE)
        process = os.pidfd_open(pid)
        try:
            self._collect(ending, {out_read: ending.stdout, err_read: ending.stderr}, process, command, started)
        finally:
            for descriptor in (out_read, err_read, process):
                os.close(descriptor)
        status = os.waitpid(pid, 0)[1]
        self._reap()
        ending.exit_code = _NOT_FOUND if problem else os.waitstatus_to_exitcode(status)
        ending.stderr += problem
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


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    pending = [pid]
    while pending:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
                fresh = {int(child) for child in children.read_text().split()} - found
                found |= fresh
                pending += fresh
    return found


def _become(command: Command, out: int, err: int, status: int) -> None:
    """Turn a fresh fork into the command. Says on `status` why it could not, and never returns."""
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for target, descriptor in enumerate((null, out, err)):
            os.dup2(descriptor, target)
        seconds = math.ceil(command.timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        if command.user_id is not None:
            os.setgroups([])
            os.setgid(command.user_id)
            os.setuid(command.user_id)
        os.umask(0o022)
        os.chdir(command.cwd)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(command.argv[0], command.argv, command.env)
    except (OSError, ValueError) as error:
        os.write(status, f"cannot run {command.argv[0]!r} in {command.cwd!r}: {error}\n".encode())
    finally:
        os._exit(_NOT_FOUND)
