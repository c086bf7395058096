"""Token ids that are kept: one number object for all places in which a token occurs."""

from collections.abc import Sequence

_LARGEST = 1 << 20
_KNOWN: dict[int, int] = {}


def shared(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the same ids in 8 bytes each: a number of its own for each would be 28 more.

    What is decoded from a message has such numbers, and a session of 100,000 tokens is one of a thousand. Ids beyond
    all vocabularies are left as they are, so that nobody fills the memory with them.
    """
    if token_ids and max(token_ids) >= _LARGEST:
        return tuple(token_ids)
    return tuple(map(_KNOWN.setdefault, token_ids, token_ids))
