"""What a key may look like: the same on every store, and harmless as a path on a disk."""

import re

from etude.errors import StoreError

MAX_KEY_BYTES = 900
"""Object stores allow 1024 bytes, the run's own prefix included."""

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=@+,~-]{0,199}")


def is_key(key: str) -> bool:
    """Say whether every `/`-separated part is plain ASCII that starts with a letter, a digit or `_`."""
    return len(key) <= MAX_KEY_BYTES and all(_SEGMENT.fullmatch(part) for part in key.split("/"))


def check_key(key: str) -> str:
    """Return the key, or raise `StoreError` when it could mean something else on a disk or in a bucket."""
    if not is_key(key):
        msg = (
            f"object key {key[:200]!r} is not allowed: use parts of letters, digits and ._=@+,~- "
            f"separated by /, none starting with a dot"
        )
        raise StoreError(msg)
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix without its trailing slash; it names a whole folder, and empty names everything."""
    folder = prefix.removesuffix("/")
    return check_key(folder) if folder else ""
