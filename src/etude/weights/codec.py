"""A tensor's bytes to the bytes that travel, and back, bit for bit.

`raw` is the bytes themselves; `xor-zstd` is the XOR with the base version's bytes, compressed: an optimizer step
leaves signs, exponents and high mantissa bits mostly alone, so most of the difference is zero.
"""

from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from etude.errors import IntegrityError

RAW: Final = "raw"
XOR_ZSTD: Final = "xor-zstd"
ENCODINGS: Final = (RAW, XOR_ZSTD)

_LEVEL = 1
"""Higher levels cost two to five times the time for under 1 % fewer bytes on weight differences."""


def encode(data: NDArray[np.uint8], base: NDArray[np.uint8] | None) -> tuple[str, bytes | memoryview]:
    """Return the encoding's name and its bytes, never more of them than `data` has.

    `base` is the same tensor at the version that the reader holds, or None when it holds none of that size.
    """
    if base is None or base.size != data.size:
        return RAW, data.data
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(np.bitwise_xor(data, base).data)
    return (XOR_ZSTD, packed) if len(packed) < data.size else (RAW, data.data)


def decode(encoding: str, packed: memoryview, *, num_bytes: int, base: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Return the tensor's `num_bytes` bytes, in memory of their own.

    Raise `IntegrityError` when `packed` is damaged or holds another number of bytes; nothing larger is allocated.
    """
    if encoding == RAW:
        if len(packed) != num_bytes:
            msg = f"a raw tensor of {num_bytes} bytes has {len(packed)}; fetch it again or use another store"
            raise IntegrityError(msg)
        return np.frombuffer(packed, np.uint8).copy()
    if encoding != XOR_ZSTD:
        msg = f"encoding {encoding!r} is unknown here; this reader knows {', '.join(ENCODINGS)}: update it"
        raise IntegrityError(msg)
    if base is None or base.size != num_bytes:
        msg = f"a difference of {num_bytes} bytes has no base of that size; load the anchor first"
        raise IntegrityError(msg)
    return np.bitwise_xor(np.frombuffer(_inflate(packed, num_bytes), np.uint8), base)


def _inflate(packed: memoryview, num_bytes: int) -> bytes:
    """The size is compared before anything is allocated: zstandard trusts the frame's own claim."""
    try:
        claimed = zstandard.frame_content_size(packed)
        if claimed != num_bytes:
            msg = f"a compressed difference claims {claimed} bytes instead of {num_bytes}; fetch it again"
            raise IntegrityError(msg)
        return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        msg = f"a compressed difference of {num_bytes} bytes is damaged ({error}); fetch it again"
        raise IntegrityError(msg) from error
