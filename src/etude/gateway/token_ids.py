"""Token ids that are kept: one number object for all places in which a token occurs."""

from collections.abc import Iterable, Sequence

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


def joined(pieces: Iterable[Sequence[int]]) -> list[int]:
    """Return the ids of all pieces; copies a long conversation several times as fast as taking id by id."""
    ids: list[int] = []
    for piece in pieces:
        ids += piece
    return ids
