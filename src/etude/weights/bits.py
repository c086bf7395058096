"""What tiles are made of: bit strings, optional compression, lists of parts. Nothing that is read is trusted."""

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from etude.errors import IntegrityError


class _Zstd(threading.local):
    """They cost more to make than a small part costs to compress, and must not be shared between threads.

    The smallest table for matches makes zstd little more than its entropy coder. On tokens, which repeat in frequency
    only, the chance matches of level 3 cost ten times the time and a fifth more bytes.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(  # pyright: ignore[reportUnknownMemberType]
            1, min_match=7, hash_log=6
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_ZSTD = _Zstd()


def require(holds: bool, what: str) -> None:  # noqa: FBT001 - the condition is the point
    """Raise `IntegrityError` unless the condition holds; whoever knows the object's name adds it."""
    if not holds:
        raise IntegrityError(what)


def bit_string(bits: NDArray[np.bool_] | NDArray[np.uint8]) -> bytes:
    """Return bits as bytes, the first one in the highest place, padded with zeros."""
    return np.packbits(bits).tobytes()


def read_bit_string(data: memoryview, count: int) -> NDArray[np.uint8]:
    """Return `count` bits, still packed; refuse another length and padding that is not zero."""
    require(len(data) == (count + 7) // 8, f"a string of {count} bits has {len(data)} bytes")
    require(not count % 8 or not data[-1] & (0xFF >> count % 8), "the padding of a bit string is not zero")
    return np.frombuffer(data, np.uint8)


def compress(data: NDArray[Any]) -> bytes:
    """Return one zstd frame that says how much it holds."""
    return _ZSTD.compressor.compress(np.ascontiguousarray(data).data)


def frame_size(frame: memoryview) -> int:
    """Return how many bytes a frame says that it holds; nothing of that size has been allocated yet."""
    try:
        claimed = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        msg = f"a compressed part is damaged ({error})"
        raise IntegrityError(msg) from error
    require(claimed >= 0, "a compressed part does not say how much it holds")
    return claimed


def decompress(frame: memoryview, num_bytes: int) -> bytes:
    """Return what a frame holds; refuse one that claims another size before anything of that size is allocated."""
    claimed = frame_size(frame)
    require(claimed == num_bytes, f"a compressed part claims {claimed} bytes instead of {num_bytes}")
    try:
        return _ZSTD.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        msg = f"a compressed part of {num_bytes} bytes is damaged ({error})"
        raise IntegrityError(msg) from error


def optionally_compressed(data: NDArray[Any], *, above: int) -> bytes:
    """Return the bytes of an array behind a zero, compressed instead (a frame never starts with zero) if it is long."""
    return compress(data) if data.size > above else b"\0" + data.tobytes()


def read_optionally_compressed(part: memoryview, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return exactly `count` elements."""
    size = count * dtype.itemsize
    require(len(part) > 0, "a part without its first byte")
    if part[0]:
        return np.frombuffer(decompress(part, size), dtype)
    require(len(part) == 1 + size, f"a part of {size} bytes has {len(part) - 1}")
    return np.frombuffer(part[1:], dtype)


def join(parts: Sequence[bytes]) -> bytes:
    """Return parts behind their number and lengths."""
    return struct.pack(f"<B{len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def split(data: memoryview, count: int) -> list[memoryview]:
    """Return the `count` parts that fill `data` edge to edge."""
    begin = 1 + 4 * count
    require(len(data) >= begin and data[0] == count, f"it does not have {count} parts")
    lengths: tuple[int, ...] = struct.unpack_from(f"<{count}I", data, 1)
    require(begin + sum(lengths) == len(data), "its parts do not fill it edge to edge")
    parts: list[memoryview] = []
    for length in lengths:
        parts.append(data[begin : begin + length])
        begin += length
    return parts
