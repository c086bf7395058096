"""Linux system calls that Python 3.11 has no function for. Standard library only: the clean zygote imports this.

Numbers are those of x86-64 and aarch64; on any other machine `SUPPORTED` is False and nothing here may be called.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct

_MACHINES = {
    "x86_64": {"clone": 56, "capset": 126, "pivot_root": 155},
    "aarch64": {"clone": 220, "capset": 91, "pivot_root": 41},
}
_NUMBERS = _MACHINES.get(os.uname().machine, {})
_OPENAT2 = 437
SUPPORTED = bool(_NUMBERS)

CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_IN_ROOT = 0x10

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41

# PyDLL keeps the interpreter lock: a child made by `clone` must not find it released.
_libc = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def clone(flags: int) -> int:
    """Fork into new namespaces. The process must have one thread; returns 0 in the child."""
    return _checked(_libc.syscall(_NUMBERS["clone"], ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0), "clone")


def unshare(flags: int) -> None:
    """Move the calling process into new namespaces."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Attach a file system; the arguments are those of the system call."""
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mount {target}",
    )


def bind_read_only(source: str, target: str) -> None:
    """Show `source` at `target`, not writable. What is mounted below it is shown too."""
    mount(source, target, flags=MS_BIND | MS_REC)
    # A user namespace may not clear flags that the source was mounted with, so those are repeated.
    kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    mount("", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept | MS_NOSUID)


def pivot_root(directory: str) -> None:
    """Make a mounted directory the root and let go of everything else."""
    os.chdir(directory)
    _checked(_libc.syscall(_NUMBERS["pivot_root"], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, value: int = 0) -> None:
    """Set one attribute of this process."""
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def keep_capabilities(kept: int) -> None:
    """Give up every capability outside the bit mask `kept`, for this process and all that follow from it."""
    for capability in range(_CAPABILITIES):
        if not kept >> capability & 1:
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except OSError:  # the kernel knows no capability of this number or above
                break
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    _checked(
        _libc.syscall(_NUMBERS["capset"], header, struct.pack("6I", low, low, 0, high, high, 0)),
        "capset",
    )


def install_seccomp(program: bytes) -> None:
    """Filter the system calls of this process and all that follow from it by a BPF program."""
    instructions = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    _checked(_libc.prctl(PR_SET_SECCOMP, 2, filter_, 0, 0), "seccomp")


def openat2(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Return a descriptor of `path`, resolved as if the directory `root` were `/`.

    Raises:
        OSError: ELOOP when a symbolic link is on the way, else as any other way to open a file.
    """
    resolve = RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    return _checked(_libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how)), f"open {path}")


def set_hostname(name: str) -> None:
    """Name the machine of this UTS namespace."""
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, len(encoded)), "sethostname")


def loopback_up() -> None:
    """Switch on the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP_RUNNING))
