"""What this machine needs to have for a run, each looked at and named."""

import contextlib
import importlib.metadata
import re
import resource
import shutil
import socket
import sys
from enum import StrEnum
from pathlib import Path

import msgspec

import etude
from etude.config import EnvironmentSection
from etude.environments.local import LocalBackend
from etude.errors import EtudeError

_PYTHON = (3, 11)
_PORTS = 32
_MIB = 1 << 20
_DISK_MIB = (256, 4096)
_MEMORY_MIB = (512, 2048)
_FILES = (256, 1024)
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[.*?\])?\s*(?P<sign>>=|==)?(?P<version>[0-9][0-9.]*)?")
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<extra>\w+)['\"]")


class State(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """Works, but not as it should."""
    PROBLEM = "problem"
    """Does not work."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    state: State
    detail: str
    action: str = ""
    """What to do about it."""


async def check_host(place: Path) -> list[Finding]:
    """Look at everything a run on this machine needs; `place` is where its files would lie."""
    return [
        _python(),
        *_libraries(),
        *_tested_versions(),
        _ports(),
        _disk(place),
        _memory(),
        _open_files(),
        *await _sandboxes(),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info[:2] >= _PYTHON
    action = "" if fits else f"install Python {_PYTHON[0]}.{_PYTHON[1]} or newer"
    return Finding(name="python", state=State.OK if fits else State.PROBLEM, detail=version, action=action)


def _libraries() -> list[Finding]:
    """Compare what is installed with what the package asks for."""
    findings: list[Finding] = []
    for line in importlib.metadata.requires("etude") or []:
        extra = _EXTRA.search(line)
        if extra is not None and extra["extra"] != "train":
            continue
        problem = _shortcoming(line)
        if problem:
            needed = "etude[train]" if extra else "etude"
            state = State.WARNING if extra else State.PROBLEM
            findings.append(Finding(name="library", state=state, detail=problem, action=f"pip install '{needed}'"))
    ok = Finding(name="libraries", state=State.OK, detail="all that training needs are there")
    return findings or [ok]


def _shortcoming(requirement: str) -> str:
    """Return what is wrong with the installed version of a requirement, empty when nothing is."""
    wanted = _REQUIREMENT.match(requirement)
    assert wanted is not None
    try:
        found = importlib.metadata.version(wanted["name"])
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted['name']} is not installed"
    if not wanted["version"]:
        return ""
    fits = _parts(found) == _parts(wanted["version"]) if wanted["sign"] == "==" else _newer(found, wanted["version"])
    return "" if fits else f"{wanted['name']} is {found}, but {wanted['sign']}{wanted['version']} is needed"


def _newer(found: str, least: str) -> bool:
    return _parts(found) >= _parts(least)


def _parts(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: 2.13.0+cpu is (2, 13)."""
    numbers = re.match(r"[0-9.]*", version)
    assert numbers is not None
    parts = [int(part) for part in numbers[0].split(".") if part]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _tested_versions() -> list[Finding]:
    """Compare with constraints.txt, where the package is used from its source tree."""
    constraints = Path(etude.__file__).parents[2] / "constraints.txt"
    if not constraints.is_file():
        return []
    others: list[str] = []
    for line in constraints.read_text().splitlines():
        name, pinned, version = line.partition("==")
        if not pinned or name.startswith("#"):
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            if _parts(found) != _parts(version):
                others.append(f"{name} {found} (tested: {version})")
    if not others:
        return [Finding(name="tested versions", state=State.OK, detail="as in constraints.txt")]
    action = "pip install -c constraints.txt '.[train]' gives the versions that the tests were run with"
    return [Finding(name="tested versions", state=State.WARNING, detail=", ".join(others), action=action)]


def _ports() -> Finding:
    """Open as many loopback ports as a run may need at once."""
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(_PORTS):
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    except OSError as error:
        detail = f"cannot listen on 127.0.0.1: {error.strerror}"
        return Finding(name="ports", state=State.PROBLEM, detail=detail, action="end the processes that hold ports")
    return Finding(name="ports", state=State.OK, detail=f"{_PORTS} loopback ports can be opened")


def _disk(place: Path) -> Finding:
    there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free // _MIB
    return _amount("disk", free, _DISK_MIB, f"{free} MiB free at {there}", "free some space, or choose another run.url")


def _memory() -> Finding:
    """Look at what the kernel and the control group of this process leave."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) // 1024
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(path).read_text()) // _MIB)
    return _amount("memory", free, _MEMORY_MIB, f"{free} MiB available", "end other programs, or take a smaller policy")


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _amount("open files", limit, _FILES, f"{limit} at once", "raise the limit with ulimit -n")


def _amount(name: str, found: int, bounds: tuple[int, int], detail: str, action: str) -> Finding:
    """Return a finding for a quantity that is too little below the first bound, and scarce below the second."""
    state = State.PROBLEM if found < bounds[0] else State.WARNING if found < bounds[1] else State.OK
    return Finding(name=name, state=state, detail=detail, action="" if state is State.OK else action)


async def _sandboxes() -> list[Finding]:
    """Make a sandbox and see what it enforces."""
    try:
        backend = await LocalBackend.start()
    except EtudeError as error:
        action = "sandboxes need user, mount, pid and network namespaces: allow them in the kernel or the container"
        return [Finding(name="sandboxes", state=State.PROBLEM, detail=str(error), action=action)]
    try:
        missing = [name for name in EnvironmentSection().require if not getattr(backend.capabilities, name)]
        limits = backend.limitations
    finally:
        await backend.close()
    findings = [Finding(name="sandboxes", state=State.WARNING, detail=limit) for limit in limits]
    if missing:
        action = "allow namespaces in the kernel or the container; --set environment.require=[] accepts the risk"
        detail = f"are not {', '.join(missing)}"
        findings.append(Finding(name="sandboxes", state=State.PROBLEM, detail=detail, action=action))
    return findings or [Finding(name="sandboxes", state=State.OK, detail="isolated and limited")]
