"""Finds out what this host enforces, by making a sandbox and trying to break out of it.

What was not seen to hold is declared False, and a sentence says why.
"""

import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from etude.environments.image import Image
from etude.environments.launcher import Welcome
from etude.environments.sandbox import LocalEnvironment
from etude.errors import SandboxError
from etude.interfaces import Capabilities, ExecResult
from etude.types import Task

_TIMEOUT_S = 20.0
_MEMORY_BOMB_BYTES = 384 << 20
_PROCESSES = 40
"""Tried to start at once; the probe's sandbox is allowed fewer."""
PROBE_PIDS = 24
PROBE_TASK = Task(task_id="probe", path="", digest="", instruction="", memory_mb=64, storage_mb=8)

_LOOK = """
import json, os, socket, sys, time
port, marker, processes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        return True
    except OSError:
        return False

def writes(path):
    try:
        open(path, "a").close()
        return True
    except OSError:
        return False

def starts(processes):
    children = []
    try:
        for _ in range(processes):
            child = os.fork()
            if child == 0:
                time.sleep(60)
            children.append(child)
        return True
    except OSError:
        return False
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)

space = os.statvfs(".")
print(json.dumps({
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in ("pid", "net", "mnt", "user")},
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "reaches_host": reaches(port),
    "sees_host": os.path.exists(marker),
    "writes_system": writes("/usr/etude-probe"),
    "writes_roots": writes("/logs/verifier/probe"),
    "storage": space.f_blocks * space.f_frsize,
    "starts_too_many": starts(processes),
}))
"""


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a program in the sandbox saw."""

    namespaces: dict[str, str]
    processes: int
    reaches_host: bool
    sees_host: bool
    writes_system: bool
    writes_roots: bool
    storage: int
    starts_too_many: bool


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the probe."""

    capabilities: Capabilities = Capabilities()
    limitations: tuple[str, ...] = ()


_WHY = {
    "user_isolated": "commands of agent and root run as the same user, or as this one",
    "process_isolated": "commands see, and may signal, other processes of this user",
    "network_isolated": "commands reach this host's network",
    "filesystem_isolated": "commands see this host's files",
    "memory_limited": "no writable memory control group: a command may use all memory",
    "cpu_limited": "no writable cpu control group: a command may use every core",
    "disk_limited": "a command may fill this host's disk",
    "pids_limited": "a command may start any number of processes",
}


async def probe(
    open_sandbox: Callable[[Task, Image, int], AbstractAsyncContextManager[LocalEnvironment]],
    welcome: Callable[[], Welcome],
    marker: Path,
) -> Findings:
    """Try each kind of trespass once, in a sandbox made for it, within about 0.2 s.

    Args:
        open_sandbox: Makes a sandbox of a task and an image, allowed a number of processes.
        welcome: What the launcher says of itself, once there is a sandbox.
        marker: A file of the host.

    Raises:
        SandboxError: No sandbox could be made, or Python does not run in it.
    """
    with socket.create_server(("127.0.0.1", 0)) as host:
        arguments = [str(host.getsockname()[1]), str(marker), str(_PROCESSES)]
        async with open_sandbox(PROBE_TASK, Image(), PROBE_PIDS) as sandbox:
            command = ["python3", "-I", "-S", "-c", _LOOK, *arguments]
            await sandbox.upload({"/logs/verifier/probe": b""})
            looked = await sandbox.execute(command, timeout_s=_TIMEOUT_S)
            bomb = f"bytearray({_MEMORY_BOMB_BYTES})"
            bombed = await sandbox.execute(["python3", "-I", "-S", "-c", bomb], timeout_s=_TIMEOUT_S)
    if looked.exit_code:
        msg = f"python3 does not run in a sandbox: {looked.stderr.decode(errors='replace')[-500:]}"
        raise SandboxError(msg)
    capabilities = _judge(msgspec.convert(json.loads(looked.stdout), _Look), bombed, welcome())
    missing = tuple(f"{name}: {why}" for name, why in _WHY.items() if not getattr(capabilities, name))
    reason = (f"no namespaces: {problem}",) if (problem := welcome().problem) else ()
    return Findings(capabilities=capabilities, limitations=reason + missing)


def _judge(look: _Look, bombed: ExecResult, welcome: Welcome) -> Capabilities:
    own = {name for name, link in look.namespaces.items() if link != str(Path(f"/proc/self/ns/{name}").readlink())}
    return Capabilities(
        user_isolated=not look.writes_roots and os.geteuid() == 0,
        process_isolated="pid" in own and look.processes < PROBE_PIDS,
        network_isolated="net" in own and not look.reaches_host,
        filesystem_isolated="mnt" in own and not look.sees_host and not look.writes_system,
        memory_limited=bombed.exit_code != 0,
        cpu_limited="cpu" in welcome.controllers,
        disk_limited=look.storage <= (PROBE_TASK.storage_mb << 20) * 16,
        pids_limited=not look.starts_too_many,
    )
