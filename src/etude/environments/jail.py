"""What the world looks like from inside a sandbox: file system, limits, privileges. Standard library only.

The zygote moves once into a root of its own, the template: read-only views of the host's programs, a few device nodes,
a minimal `/etc`. Each sandbox copies from it with one bind mount per entry, so that no path of the host is ever in
sight of the code that sets a sandbox up, let alone of the code that runs in it.
"""

import os
import resource
import socket
from functools import cache
from pathlib import Path
from typing import Any

from etude.environments import seccomp, syscalls

AGENT_ID = 1000
MODEL_PORT = 8080
HOST_NAME = "sandbox"

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_COPIED_ETC = ("ld.so.cache", "ld.so.conf", "alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PLACE_OF_TEMPLATE = "/sys"
_NEW_ROOT = "/new"
_OPEN_FILES = 1024
_MAX_INODES = 50_000
# chown, dac_override, fowner, fsetid, kill, setgid, setuid: what root needs to act as root on the sandbox's own files
# and users. All of them count only within the sandbox's user namespace.
_KEPT_CAPABILITIES = 0b1111_1011

_WRITABLE = {
    "tmp": 0o1777,
    "var/tmp": 0o1777,
    "run": 0o755,
    "run/shm": 0o1777,
    "root": 0o711,
    "home/agent": 0o755,
    "logs/verifier": 0o755,
    "logs/agent": 0o755,
}
_OWNED_BY_AGENT = ("home/agent", "logs/agent")


def build_template(mounts: list[tuple[str, str]], *, agent_id: int) -> None:
    """Move this process, which has a mount namespace of its own, into the template root.

    Args:
        mounts: Further directories to show read-only, as (path on the host, path in the sandbox).
        agent_id: User and group number of `agent` inside.
    """
    syscalls.mount("", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    sources = {target: os.open(source, os.O_PATH | os.O_DIRECTORY) for source, target in mounts}
    base = Path(_PLACE_OF_TEMPLATE)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmpfs", str(base), "tmpfs", flags, "size=4m,mode=755")
    for name in _SYSTEM:
        host = Path("/", name)
        if host.is_symlink():
            (base / name).symlink_to(host.readlink())
        elif host.is_dir():
            (base / name).mkdir()
            syscalls.bind_read_only(str(host), str(base / name))
    for target, source in sources.items():
        place = base / target.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        syscalls.bind_read_only(f"/proc/self/fd/{source}", str(place))
        os.close(source)
    _make_etc(base / "etc", agent_id)
    _make_devices(base / "dev")
    (base / "proc").mkdir()
    # A user namespace may mount a /proc of its own only while it sees one that hides nothing.
    syscalls.mount("/proc", str(base / "proc"), flags=syscalls.MS_BIND | syscalls.MS_REC)
    (base / _NEW_ROOT.lstrip("/")).mkdir()
    syscalls.pivot_root(str(base))
    _seccomp_program()


def _make_etc(etc: Path, agent_id: int) -> None:
    etc.mkdir()
    passwd = f"root:x:0:0:root:/root:/bin/sh\nagent:x:{agent_id}:{agent_id}:agent:/home/agent:/bin/sh\n"
    texts = {
        "passwd": passwd + "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "group": f"root:x:0:\nagent:x:{agent_id}:\nnogroup:x:65534:\n",
        "hosts": f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost\n",
        "hostname": f"{HOST_NAME}\n",
        "resolv.conf": "",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
    for name in _COPIED_ETC:
        host = Path("/etc", name)
        if host.is_dir():
            (etc / name).mkdir()
            syscalls.bind_read_only(str(host), str(etc / name))
        elif host.is_file():
            (etc / name).write_bytes(host.read_bytes())
    syscalls.bind_read_only(str(etc), str(etc))


def _make_devices(dev: Path) -> None:
    dev.mkdir()
    for name in _DEVICES:
        (dev / name).touch()
        syscalls.mount(f"/dev/{name}", str(dev / name), flags=syscalls.MS_BIND)
    (dev / "pts").mkdir()
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
    for name, target in {**links, "shm": "/run/shm"}.items():
        (dev / name).symlink_to(target)
    syscalls.bind_read_only(str(dev), str(dev))


def enter(spec: dict[str, Any], mounts: list[str], *, agent_id: int, listen: bool) -> socket.socket | None:
    """Turn this process, the first of fresh namespaces, into the inside of a sandbox; there is no way back.

    Args:
        spec: `storage_bytes` and `pids` of the sandbox.
        mounts: Paths of further directories that the template shows.
        agent_id: User and group number of `agent` inside.
        listen: Whether there is a model API.

    Returns:
        The socket that the model API is reached at, listening, if there is one.
    """
    _make_root(spec["storage_bytes"], mounts, agent_id)
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)
    syscalls.set_hostname(HOST_NAME)
    syscalls.loopback_up()
    listener = None
    if listen:
        listener = socket.create_server(("127.0.0.1", MODEL_PORT), backlog=64)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)
    limit_resources(storage_bytes=spec["storage_bytes"], pids=spec["pids"])
    _drop_privileges()
    return listener


def limit_resources(*, storage_bytes: int, pids: int | None) -> None:
    """Set limits that hold per process (`pids`: per user), for this process and all that follow from it."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _OPEN_FILES, resource.RLIMIT_FSIZE: storage_bytes}
    if pids is not None:
        limits[resource.RLIMIT_NPROC] = pids
    for kind, wanted in limits.items():
        most = resource.getrlimit(kind)[1]
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, value))


def _make_root(storage_bytes: int, mounts: list[str], agent_id: int) -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    options = f"size={storage_bytes},nr_inodes={_MAX_INODES},mode=755"
    syscalls.mount("tmpfs", _NEW_ROOT, "tmpfs", flags, options)
    for name in (*_SYSTEM, "etc", "dev"):
        shown = Path("/", name)
        if shown.is_symlink():
            Path(_NEW_ROOT, name).symlink_to(shown.readlink())
        elif shown.is_dir():
            _show(str(shown))
    for target in mounts:
        _show(target)
    syscalls.mount("devpts", f"{_NEW_ROOT}/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "ptmxmode=666")
    Path(_NEW_ROOT, "proc").mkdir()
    syscalls.mount("proc", f"{_NEW_ROOT}/proc", "proc", flags | syscalls.MS_NOEXEC)
    make_directories(_NEW_ROOT, agent_id=agent_id, root_id=0)
    syscalls.pivot_root(_NEW_ROOT)


def _show(path: str) -> None:
    """Show a directory of the template, read-only as it is there, in the root being made."""
    Path(_NEW_ROOT + path).mkdir(parents=True, exist_ok=True)
    syscalls.mount(path, _NEW_ROOT + path, flags=syscalls.MS_BIND | syscalls.MS_REC)


def make_directories(root: str, *, agent_id: int, root_id: int) -> None:
    """Make the writable directories that every sandbox has below its root."""
    for name, mode in _WRITABLE.items():
        path = Path(root, name)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        owner = agent_id if name in _OWNED_BY_AGENT else root_id
        os.chown(path, owner, owner)


@cache
def _seccomp_program() -> bytes:
    return seccomp.assemble(os.uname().machine)


def _drop_privileges() -> None:
    # Not dumpable: other processes of the sandbox can neither trace this one nor read its memory and descriptors.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.keep_capabilities(_KEPT_CAPABILITIES)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.install_seccomp(_seccomp_program())
