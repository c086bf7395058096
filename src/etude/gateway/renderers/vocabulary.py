"""Texts to token ids so that nobody but the renderer can write a special token, and ids to text.

A turn is a list of pieces: `Frame`s, which the format dictates, and plain strings, which came from outside. Added
tokens are looked for in frames only. What lies between two of them is encoded in one call, frames and strings together,
as an engine does with the text of a chat template: the ids are the same, for every text in which nobody spelled an
added token.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
from tokenizers import AddedToken, Tokenizer

from etude.errors import PolicyError

# The library would hand each text to another thread, which takes longer than to encode it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Frame(str):
    """Text that the format dictates: added tokens in it are meant."""

    __slots__ = ()


class Vocabulary:
    """A tokenizer in two: with its added tokens, and without.

    Raises `PolicyError` when plain text could become a special token, or is not given back as it was.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._plain = _without_added_tokens(tokenizer)
        self._known = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        longest_first = sorted(added.values(), key=lambda token: -len(token.content))
        self._pattern = re.compile("|".join(map(_pattern_of, longest_first)) or "(?!)")
        self._prove({token_id: token.content for token_id, token in added.items() if token.special})

    @classmethod
    def of(cls, tokenizer: "Tokenizer | Vocabulary") -> "Vocabulary":
        """Return the vocabulary of a tokenizer; making one takes a second for a large tokenizer, so share it."""
        return tokenizer if isinstance(tokenizer, Vocabulary) else cls(tokenizer)

    @property
    def added_tokens(self) -> frozenset[str]:
        """What frames may say that nobody else may."""
        return frozenset(self._added)

    def id_of(self, token: str) -> int:
        """Return an added token's id; raise `PolicyError` when the tokenizer lacks it."""
        if token not in self._added:
            msg = f"the tokenizer has no token {token}"
            raise PolicyError(msg)
        return self._added[token]

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Return the ids of pieces that follow one another."""
        ids: list[int] = []
        for is_token, run in groupby(self._split(pieces), lambda piece: isinstance(piece, int)):
            if is_token:
                ids += [piece for piece in run if isinstance(piece, int)]
            else:
                text = "".join(str(piece) for piece in run)
                # A batch lets other threads work meanwhile, and a fast one does not look where each token was found.
                ids += self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; what is no UTF-8 and ids that the tokenizer does not have become U+FFFD."""
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False) if is_known else "\ufffd" * len(list(run))
            for is_known, run in groupby(token_ids, self._known.__contains__)
        )

    def _split(self, pieces: Iterable[str]) -> Iterator[str | int]:
        for piece in pieces:
            if not isinstance(piece, Frame):
                yield piece
                continue
            place = 0
            for found in self._pattern.finditer(piece):
                if found.start() > place:
                    yield piece[place : found.start()]
                yield self._added[found[found.lastindex or 0]]
                place = found.end()
            if place < len(piece):
                yield piece[place:]

    def _prove(self, special: dict[int, str]) -> None:
        for token_id, text in special.items():
            if token_id in self.encode([text]):
                msg = f"the tokenizer encodes the plain text {text!r} as its special token {token_id}"
                raise PolicyError(msg)
        sample = "a b\n  c = {'d': \"é\"}\n"
        back = self.decode(self.encode([sample]))
        if back != sample:
            msg = f"the tokenizer turns {sample!r} into {back!r}: use a byte-level one"
            raise PolicyError(msg)


def _pattern_of(token: AddedToken) -> str:
    """Return what a token matches: some swallow the white space beside them."""
    before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    return f"{before}({re.escape(token.content)}){after}"


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    state = msgspec.json.decode(tokenizer.to_str())
    state["added_tokens"] = []
    state["post_processor"] = None
    return Tokenizer.from_str(msgspec.json.encode(state).decode())
