"""JSON data from a harness or a model, made safe to keep: bounded, encodable, of a known shape."""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

MAX_TEXT_CHARS = 1 << 16
"""Longer texts are cut, with a mark that says by how much."""

MAX_DEPTH = 32


def as_mapping(value: object) -> Mapping[object, object]:
    """Return a mapping, empty for anything else."""
    return cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {}


def as_list(value: object) -> Sequence[object]:
    """Return a list, empty for anything else."""
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def clean(value: object, depth: int = 0) -> object:
    """Return JSON data with every text cut and encodable, and no deeper than `MAX_DEPTH`."""
    if depth > MAX_DEPTH:
        return "[nested too deeply]"
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, Mapping):
        return {cut(str(key)): clean(item, depth + 1) for key, item in as_mapping(value).items()}  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [clean(item, depth + 1) for item in as_list(value)]  # pyright: ignore[reportUnknownArgumentType]
    return value if isinstance(value, bool | int | float) or value is None else repr(value)


def clean_mapping(value: object) -> dict[str, object]:
    """Return a JSON object for the document, empty for anything that is none."""
    return cast("dict[str, object]", clean(as_mapping(value)))


def as_text(value: object) -> str:
    """Return message content as text: multi-part content is joined, anything odd is shown as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, list | tuple):
        return cut("\n".join(_part(part) for part in as_list(value)))  # pyright: ignore[reportUnknownArgumentType]
    return cut(msgspec.json.encode(clean(value)).decode())


def _part(part: object) -> str:
    """Return one part of multi-part content."""
    text = as_mapping(part).get("text")
    return text if isinstance(text, str) else msgspec.json.encode(clean(part)).decode()


def cut(text: str) -> str:
    """Return at most `MAX_TEXT_CHARS` characters, encodable as UTF-8, and how many were left out."""
    clean = text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
    return clean if len(text) <= MAX_TEXT_CHARS else f"{clean}\n[{len(text) - MAX_TEXT_CHARS} more characters]"
