"""The system-call filter of a sandbox, assembled by hand so that no library is needed inside. Standard library only.

Everything is allowed but what reaches beyond a sandbox or is a common way out of one: mounts and namespaces, the
keyring, BPF, io_uring, modules, clocks, and sockets that network namespaces do not confine (AF_VSOCK is one).
"""

import errno
import struct
from collections.abc import Iterator

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_X32_BIT = 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""

# From 424 on all machines count alike: pidfd_send_signal is 424, io_uring 425-427, the mount family 428-433 and 442.
_SHARED = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 443, 467)

_MACHINES: dict[str, tuple[int, dict[str, int], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "ioctl": 16, "socket": 41},
        # mount umount2 pivot_root chroot unshare setns; add_key request_key keyctl; bpf perf userfaultfd
        (
            *(165, 166, 155, 161, 272, 308, 248, 249, 250, 321, 298, 323),
            # kexec x2, modules x3, file handles x2, swap x2, reboot syslog acct quotactl
            *(246, 320, 175, 313, 176, 303, 304, 167, 168, 169, 103, 163, 179),
            # settimeofday clock_settime adjtimex clock_adjtime; iopl ioperm; process_vm x2 kcmp; lookup_dcookie uselib
            *(164, 227, 159, 305, 172, 173, 310, 311, 312, 212, 134),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "ioctl": 29, "socket": 198},
        (
            *(40, 39, 41, 51, 97, 268, 217, 218, 219, 280, 241, 282),
            *(104, 294, 105, 273, 106, 264, 265, 224, 225, 142, 116, 89, 60),
            *(170, 112, 171, 266, 270, 271, 272, 18),
        ),
    ),
}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _refuse(number: int, error: int) -> Iterator[bytes]:
    yield _instruction(_EQUAL, number, 0, 1)
    yield _instruction(_RETURN, _ERRNO | error)


def _instructions(machine: str) -> Iterator[bytes]:
    architecture, calls, denied = _MACHINES[machine]
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_EQUAL, architecture, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    yield _instruction(_AT_LEAST, _X32_BIT, 0, 1)
    yield _instruction(_RETURN, _KILL)
    # The flags of clone3 are in memory, where a filter cannot look; "no such call" makes the C library use clone.
    yield from _refuse(_CLONE3, errno.ENOSYS)
    yield _instruction(_EQUAL, calls["clone"], 0, 4)
    yield _instruction(_LOAD, _ARGUMENT_0)
    yield _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    yield _instruction(_RETURN, _ERRNO | errno.EPERM)
    yield _instruction(_LOAD, _NUMBER)
    # Typing into the terminal of another process.
    yield _instruction(_EQUAL, calls["ioctl"], 0, 5)
    yield _instruction(_LOAD, _ARGUMENT_1)
    yield _instruction(_EQUAL, _TIOCSTI, 1, 0)
    yield _instruction(_EQUAL, _TIOCLINUX, 0, 1)
    yield _instruction(_RETURN, _ERRNO | errno.EPERM)
    yield _instruction(_LOAD, _NUMBER)
    yield _instruction(_EQUAL, calls["socket"], 0, len(_FAMILIES) + 3)
    yield _instruction(_LOAD, _ARGUMENT_0)
    for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True):
        yield _instruction(_EQUAL, family, left, 0)
    yield _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
    yield _instruction(_LOAD, _NUMBER)
    for number in (*denied, *_SHARED):
        yield from _refuse(number, errno.EPERM)
    yield _instruction(_RETURN, _ALLOW)


def assemble(machine: str) -> bytes:
    """Return the BPF program for `x86_64` or `aarch64`. Raise `KeyError` for other machines."""
    return b"".join(_instructions(machine))
