"""Which call's tokens a prompt repeats or goes on from, found by digests."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

_BYTES = 8


class TokenPrefixes:
    """The sequences of a session's calls: S = prompt and drawn tokens, from the root on."""

    def __init__(self) -> None:
        self._states: list[blake2b] = []
        self._asked: dict[bytes, int] = {}
        self._ends: dict[int, dict[bytes, int]] = {}
        self._lengths: list[int] = []
        self._ids: Sequence[int] = ()
        self._data = b""

    def add(self, *, parent: int | None, prompt_ids: Sequence[int], drawn: Sequence[int], length: int) -> None:
        """Take in the next call; `length` is that of S."""
        node_id = len(self._states)
        state = self._extended(parent, prompt_ids)
        self._ids, self._data = (), b""
        self._asked.setdefault(state.digest(), node_id)
        state.update(_bytes(drawn))
        self._states.append(state)
        if length not in self._ends:
            insort(self._lengths, length)
        self._ends.setdefault(length, {})[state.digest()] = node_id

    def twin(self, parent: int | None, prompt_ids: Sequence[int]) -> int | None:
        """Return the first call with the same prompt."""
        return self._asked.get(self._extended(parent, prompt_ids).digest())

    def longest(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the call whose S is the longest proper prefix of a whole prompt; the newest of equals."""
        state, found = blake2b(digest_size=16), None
        known = self._lengths[: bisect_left(self._lengths, len(prompt_ids))]
        data = self._encoded(prompt_ids)
        for start, end in pairwise((0, *known)):
            state.update(data[_BYTES * start : _BYTES * end])
            found = self._ends[end].get(state.digest(), found)
        return found

    def begins(self, node_id: int, prompt_ids: Sequence[int], *, length: int) -> bool:
        """Return whether a whole prompt begins with S of a call, which has this length."""
        state = blake2b(_bytes(prompt_ids[:length]), digest_size=16)
        return state.digest() == self._states[node_id].digest()

    def _extended(self, parent: int | None, token_ids: Sequence[int]) -> blake2b:
        state = blake2b(digest_size=16) if parent is None else self._states[parent].copy()
        state.update(self._encoded(token_ids))
        return state

    def _encoded(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of a prompt, which is looked at several times until its call is added."""
        if token_ids is not self._ids:
            self._ids, self._data = token_ids, _bytes(token_ids)
        return self._data


def _bytes(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()
