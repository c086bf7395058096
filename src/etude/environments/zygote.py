"""The process that sandboxes are forked from. Standard library only.

It is started by `execve` with an empty environment, so that neither arguments, environment nor memory of the trainer
are in any sandbox. It serves one backend over a socket; when that ends, by `kill -9` or otherwise, it kills every
sandbox, removes what it made, and leaves.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from etude.environments import jail, plain, syscalls
from etude.environments.agent import Agent, Place
from etude.environments.cgroups import ControlGroups
from etude.environments.commands import children_of, kill_descendants
from etude.environments.framing import Header, encode, receive

_MAX_MESSAGE = 1 << 16
_STREAM, _GO, _MEMORY_EVENTS = 3, 4, 5
"""Descriptors of a sandbox's first process."""
_NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)
_FIRST_HOST_ID = 0x70000000
"""Users of sandboxes are numbers above this one on the host, which belong to nobody there."""
_NUM_IDS = 65536


class Zygote:
    """Makes sandboxes on request."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._mounts: list[tuple[str, str]] = [(source, target) for source, target in settings["mounts"]]
        self._interpreter: str = settings["interpreter"]
        self._namespaces: bool = settings["namespaces"]
        self._privileged = os.geteuid() == 0
        self._agent_id = jail.AGENT_ID if self._privileged else 0
        self._groups = ControlGroups(settings["backend"])
        self._names: dict[int, str] = {}
        self._roots: dict[int, str] = {}
        self.contained = False

    @property
    def controllers(self) -> frozenset[str]:
        """Control-group controllers that can be used."""
        return self._groups.controllers

    def contain(self) -> str:
        """Enter the template root. Returns why the kernel does not let it, or nothing."""
        # Where no pid namespace holds a sandbox together, what a killed one leaves comes to this process.
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        if not self._namespaces:
            return "not asked for"
        if not syscalls.SUPPORTED:
            return f"no system-call table for {os.uname().machine}"
        try:
            user, group = os.geteuid(), os.getegid()
            if self._privileged:
                syscalls.unshare(syscalls.CLONE_NEWNS)
            else:
                syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
                _map_ids("self", user, group, 1)
            shown = [(path, path) for path in (self._interpreter,) if path]
            jail.build_template([*shown, *self._mounts], agent_id=self._agent_id)
        except OSError as error:
            return str(error)
        self.contained = True
        return ""

    def serve(self) -> None:
        """Answer requests until the backend goes away; never returns."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(wake_read, select.POLLIN)
        poll.register(self._control.fileno(), select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if wake_read in ready:
                os.read(wake_read, _MAX_MESSAGE)
                self._bury()
            if self._control.fileno() in ready and not self._take_request():
                self._leave()

    def _take_request(self) -> bool:
        """Handle one message; False when there will be no more."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 1)
        except OSError:
            return False
        if not message:
            return False
        request = json.loads(message)
        if request["op"] == "kill":
            for pid in [pid for pid, name in self._names.items() if name == request["name"]]:
                self._kill(pid)
            return True
        try:
            with _received(descriptors) as stream:
                self._spawn(request, stream)
        except OSError as error:
            self._tell({"failed": request["name"], "error": str(error)})
            if request["name"] not in self._names.values():
                self._forget(request["name"])
        return True

    def _spawn(self, request: Header, stream: socket.socket) -> None:
        name: str = request["name"]
        self._groups.create(name, memory_bytes=request["memory_bytes"], pids=request["pids"], cpus=request["cpus"])
        with contextlib.ExitStack() as opened:
            go = os.pipe()
            memory_events = self._groups.memory_events(name)
            for descriptor in (*go, *([memory_events] if memory_events >= 0 else [])):
                opened.callback(os.close, descriptor)
            self._start(name, request, (stream.fileno(), go[0], memory_events), go[1])

    def _start(self, name: str, request: Header, descriptors: tuple[int, int, int], go: int) -> None:
        root = "/" if self.contained else plain.make_root(name)
        try:
            pid = syscalls.clone(_NAMESPACES) if self.contained else os.fork()
        except OSError:
            if not self.contained:
                plain.remove_root(root)
            raise
        if pid == 0:
            _isolate_descriptors(descriptors)
            self._become_sandbox(root, limited=descriptors[2] >= 0, listen=request["listen"])
        self._names[pid] = name
        if not self.contained:
            self._roots[pid] = root
        try:
            if self.contained:
                self._map_sandbox(pid)
            self._groups.enter(name, pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
        self._tell({"made": name, "pid": pid})
        os.write(go, b"x")

    def _map_sandbox(self, pid: int) -> None:
        if self._privileged:
            _map_ids(str(pid), _FIRST_HOST_ID, _FIRST_HOST_ID, _NUM_IDS)
        else:
            _map_ids(str(pid), 0, 0, 1)

    def _become_sandbox(self, root: str, *, limited: bool, listen: bool) -> None:
        """Be the first process of a sandbox; never returns."""
        stream = socket.socket(fileno=_STREAM)
        try:
            if not os.read(_GO, 1):
                os._exit(1)
            os.close(_GO)
            spec, body = receive(stream)
            listener = self._settle(spec, root, listen=listen)
            path = f"{self._interpreter}/bin" if self._interpreter else ""
            place = Place(
                root=root,
                alone=self.contained,
                user_ids=self._user_ids(),
                memory_events=_MEMORY_EVENTS if limited else -1,
                path=path,
            )
            agent = Agent(stream, place, spec)
            agent.prepare(spec, body)
            ready = encode({"contained": self.contained, "privileged": self._privileged})
            if listener:
                socket.send_fds(stream, [ready], [listener.fileno()])
                listener.close()
            else:
                stream.sendall(ready)
            agent.serve()
        except (OSError, EOFError, ValueError) as error:
            with contextlib.suppress(OSError):
                stream.sendall(encode({"error": f"{type(error).__name__}: {error}"}))
        finally:
            os._exit(1)

    def _settle(self, spec: Header, root: str, *, listen: bool) -> socket.socket | None:
        if self.contained:
            if self._privileged:
                # The host's root has no number in the new user namespace; only the sandbox's own root has.
                os.setgroups([])
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
            shown = [path for path in (self._interpreter,) if path]
            targets = [target for _, target in self._mounts]
            return jail.enter(spec, [*shown, *targets], agent_id=self._agent_id, listen=listen)
        root_id, agent_id = (_FIRST_HOST_ID, _FIRST_HOST_ID + jail.AGENT_ID) if self._privileged else (-1, -1)
        plain.settle(root, self._mounts, storage_bytes=spec["storage_bytes"], agent_id=agent_id, root_id=root_id)
        return None

    def _kill(self, pid: int) -> None:
        if not self.contained:
            kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)

    def _user_ids(self) -> dict[str, int | None]:
        if not self._privileged:
            return {"agent": None, "root": None}
        if self.contained:
            return {"agent": self._agent_id, "root": None}
        return {"agent": _FIRST_HOST_ID + jail.AGENT_ID, "root": _FIRST_HOST_ID}

    def _bury(self) -> None:
        """Take note of sandboxes that ended, and remove what they leave."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if not self.contained:
                    self._kill_orphans()
                if root := self._roots.pop(pid, ""):
                    plain.remove_root(root)
                if name := self._names.pop(pid, ""):
                    self._forget(name)

    def _kill_orphans(self) -> None:
        """End what sandboxes without a pid namespace left when their first process was killed."""
        for orphan in children_of(os.getpid()) - self._names.keys():
            kill_descendants(orphan)
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)

    def _forget(self, name: str) -> None:
        self._groups.remove(name)
        self._tell({"gone": name})

    def _tell(self, message: Header) -> None:
        with contextlib.suppress(OSError):  # an owner that has gone needs no telling
            self._control.send(json.dumps(message).encode())

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in self._names:
            self._kill(pid)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, 0)
                name = self._names.pop(pid, "")
                if not self.contained:
                    self._kill_orphans()
                if root := self._roots.pop(pid, ""):
                    plain.remove_root(root)
                if name:
                    self._groups.remove(name)
        self._groups.close()
        os._exit(0)


def _received(descriptors: list[int]) -> socket.socket:
    """Return the socket that came with a message; without room for one, the kernel leaves it out."""
    if not descriptors:
        raise OSError(errno.EMFILE, "the launcher has too many open files")
    return socket.socket(fileno=descriptors[0])


def _ignore(_signal: int, _frame: object) -> None:
    """Only there so that the signal wakes the loop."""


def _map_ids(pid: str, first_user: int, first_group: int, count: int) -> None:
    process = Path("/proc", pid)
    (process / "uid_map").write_text(f"0 {first_user} {count}\n")
    if count == 1:
        (process / "setgroups").write_text("deny\n")
    (process / "gid_map").write_text(f"0 {first_group} {count}\n")


def _isolate_descriptors(kept: tuple[int, int, int]) -> None:
    """Keep socket, starting signal and memory events (-1: none) as 3, 4 and 5, and nothing else of the zygote's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = 100
    places = (_STREAM, _GO, _MEMORY_EVENTS)
    present = [(descriptor, place) for descriptor, place in zip(kept, places, strict=True) if descriptor >= 0]
    for descriptor, place in present:
        os.dup2(descriptor, high + place)
    for _, place in present:
        os.dup2(high + place, place, inheritable=False)
    os.closerange(len(present) + _STREAM, 1 << 16)


def main(descriptor: int) -> None:
    """Serve the backend at the other end of the inherited socket."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    sys.path.clear()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    zygote = Zygote(control, json.loads(control.recv(_MAX_MESSAGE)))
    problem = zygote.contain()
    control.send(json.dumps({"problem": problem, "controllers": sorted(zygote.controllers)}).encode())
    zygote.serve()
