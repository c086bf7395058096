"""Messages between a backend and a sandbox: a JSON header and a raw body. Standard library only."""

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!II")
PREFIX_BYTES = _LENGTHS.size
MAX_HEADER_BYTES = 8 << 20
MAX_BODY_BYTES = 1 << 29

Header = dict[str, Any]


def encode(header: Header, body: bytes = b"", *, body_length: int | None = None) -> bytes:
    """Return a message as it travels; with `body_length`, that many bytes of body are sent after it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(body) if body_length is None else body_length) + text + body


def lengths(prefix: bytes) -> tuple[int, int]:
    """Bytes of header and body that follow a prefix. Raise `ValueError` beyond the limits."""
    header, body = _LENGTHS.unpack(prefix)
    if header > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        msg = f"message of {header} + {body} bytes exceeds the limit"
        raise ValueError(msg)
    return header, body


def receive(stream: socket.socket) -> tuple[Header, bytes]:
    """Block until a whole message is there. Raise `EOFError` when the other side is gone."""
    header_length, body_length = lengths(_exactly(stream, PREFIX_BYTES))
    header: Header = json.loads(_exactly(stream, header_length))
    return header, _exactly(stream, body_length)


def _exactly(stream: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view, position = memoryview(received), 0
    while position < count:
        got = stream.recv_into(view[position:])
        if not got:
            raise EOFError
        position += got
    return bytes(received)
