"""Bodies that clients compress, which costs them little and may cost whoever unpacks them everything."""

import zlib

import zstandard

from etude.gateway import refusals

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_ZSTD_WINDOW = 8 << 20
"""Bytes that a frame may make a reader keep; by default it is 128 MiB."""


def unpacked(body: bytes, coding: str, limit: int) -> bytes:
    """Return a body as it was before it was compressed, without making more than `limit` bytes of it.

    Raises:
        CallRefusedError: It is larger (413), broken (400), or in another coding than gzip, deflate and zstd (415).
    """
    match coding.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip" | "deflate":
            plain, is_whole = _inflated(body, limit + 1)
        case "zstd":
            plain, is_whole = _unzstd(body, limit + 1)
        case _:
            raise refusals.unknown_coding(coding)
    if len(plain) > limit:
        raise refusals.body_too_large(limit)
    if not is_whole:
        raise refusals.malformed(f"the request's body is no {coding[:8]}, or broken off")
    return plain


def _inflated(body: bytes, most: int) -> tuple[bytes, bool]:
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = reader.decompress(body, most)
    except zlib.error:
        return b"", False
    return plain, reader.eof


def _unzstd(body: bytes, most: int) -> tuple[bytes, bool]:
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(body)
    try:
        return reader.read(most), True
    except zstandard.ZstdError:
        return b"", False
