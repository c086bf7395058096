# pyright: basic
import errno
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.environments.framing import MAX_BODY_BYTES, MAX_HEADER_BYTES, encode, lengths, receive
from etude.environments.seccomp import assemble

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5
)


@given(st.lists(st.tuples(st.dictionaries(st.text(), values), st.binary(max_size=2000)), max_size=4))
def test_messages_arrive_in_order_and_whole(messages):
    here, there = socket.socketpair()
    with here, there:
        for header, body in messages:
            here.sendall(encode(header, body))
        here.close()
        assert [receive(there) for _ in messages] == messages
        with pytest.raises(EOFError):
            receive(there)


@pytest.mark.parametrize("announced", [(MAX_HEADER_BYTES + 1, 0), (0, MAX_BODY_BYTES + 1)])
def test_a_message_beyond_the_limits_is_refused_before_it_is_read(announced):
    with pytest.raises(ValueError, match="exceeds"):
        lengths(struct.pack("!II", *announced))


ALLOW, KILL = 0x7FFF0000, 0x80000000


def verdict(machine, architecture, number, *arguments):
    """Run a BPF program as the kernel does."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("HBBI", assemble(machine)))
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
        position += if_true if holds else if_false


MACHINES = {
    "x86_64": (0xC000003E, {"clone": 56, "socket": 41, "ioctl": 16, "mount": 165, "write": 1, "execve": 59}),
    "aarch64": (0xC00000B7, {"clone": 220, "socket": 198, "ioctl": 29, "mount": 40, "write": 64, "execve": 221}),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_leads_out_and_lets_the_rest_through(machine):
    architecture, calls = MACHINES[machine]

    def call(name, *arguments):
        return verdict(machine, architecture, calls.get(name, name), *arguments)

    refused = 0x00050000 | errno.EPERM
    assert call("write") == call("execve") == ALLOW
    assert call("mount") == call(425) == call(428) == refused
    assert call(435) == 0x00050000 | errno.ENOSYS
    assert call("clone", 0x1200011) == ALLOW
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert call("clone", namespace | 17) == refused
    assert [call("socket", family) == ALLOW for family in (1, 2, 10, 16, 17, 38, 40)] == [True] * 4 + [False] * 3
    assert [call("ioctl", 0, request) for request in (0x5401, 0x5412, 0x541C)] == [ALLOW, refused, refused]
    assert verdict(machine, 0x40000003, 1) == KILL
    assert call(0x40000001) == KILL
