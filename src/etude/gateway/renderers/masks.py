"""Hides what looks like a token of the format in texts from outside, while a template works on them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar, cast

_Value = TypeVar("_Value")


class Masks:
    """Marks every added token that somebody spelled, with a character that no text has and that is cut out again."""

    def __init__(self, tokens: frozenset[str]) -> None:
        longest_first = sorted(tokens, key=lambda token: -len(token))
        # A token may begin inside of another one, therefore nothing is consumed.
        self.pattern = re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")

    def apply(self, value: _Value) -> tuple[str, _Value]:
        """Return the mark, empty when there is nothing to mark, and the value with its texts marked."""
        texts = list(_texts(value))
        if not any(self.pattern.search(text) for text in texts):
            return "", value
        longest = max((len(run) for text in texts for run in re.findall("\ufdd0+", text)), default=0)
        mark = "\ufdd0" * (longest + 1)
        return mark, cast("_Value", _changed(value, lambda text: self._mark(text, mark)))

    def _mark(self, text: str, mark: str) -> str:
        places = [found.start() + 1 for found in self.pattern.finditer(text)]
        return mark.join(text[a:b] for a, b in pairwise([0, *places, len(text)]))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[object]", value):
            yield from _texts(item)


def _changed(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(item, change) for key, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in cast("Sequence[object]", value)]
    return value
