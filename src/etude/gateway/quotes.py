"""Whether one text was made from another: harnesses wrap what they quote, and change the white space around it."""

import re
from collections.abc import Mapping
from functools import cached_property

_TAGS = re.compile(r"</?summary>", re.IGNORECASE)
_TAGGED = re.compile(r"<summary>(.*?)</summary>", re.IGNORECASE | re.DOTALL)
_MOST_CHARS = 1 << 18

LEAST_CHARS = 24
"""Shorter quotes count only as lines of their own: a word such as "ok" is in every long text."""


class Quoting:
    """A text that may quote others; its first 262,144 characters are looked at."""

    def __init__(self, text: str) -> None:
        self._text = text[:_MOST_CHARS]

    @cached_property
    def _blank_free(self) -> str:
        return blank_free(self._text)

    @cached_property
    def _lines(self) -> str:
        return _lines(self._text)

    def quotes(self, text: str) -> bool:
        """Return whether all of a text is in here: anywhere if it is long, else as lines of its own."""
        sought = blank_free(text)
        if len(sought) >= LEAST_CHARS:
            return sought in self._blank_free
        return bool(sought) and _lines(text) in self._lines


def blank_free(text: str) -> str:
    """Return a text with each stretch of white space as one blank, and none around it."""
    return " ".join(text[:_MOST_CHARS].split())


def text_of(message: Mapping[str, object]) -> str:
    """Return the text of a message."""
    return str(message.get("content") or "")


def quotable(text: str) -> tuple[str, ...]:
    """Return what of an answer others quote: all of it, and what it marks as its summary."""
    return (text, *(found[1] for found in _TAGGED.finditer(text[:_MOST_CHARS])))


def _lines(text: str) -> str:
    lines = "\n".join(" ".join(line.split()) for line in _TAGS.sub("\n", text).splitlines()).strip("\n")
    return f"\n{lines}\n"
