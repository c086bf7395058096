"""Tables as TOML text with a comment behind each value; the standard library only reads TOML."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, cast

Table = dict[str, Any]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def leaves(value: object, key: str = "") -> Iterator[str]:
    """Yield the dotted key of every value below; lists of tables are indexed, an empty table counts as a value."""
    dot = f"{key}." if key else ""
    if is_table(value) and value:
        for name, below in value.items():
            yield from leaves(below, f"{dot}{name}")
    elif is_list_of_tables(value):
        for index, below in enumerate(value):
            yield from leaves(below, f"{dot}{index}")
    else:
        yield key


def to_toml(table: Table, comments: Mapping[str, str]) -> str:
    """Return a table of text, numbers, booleans, lists and tables as TOML.

    Args:
        table: What to write.
        comments: By dotted key of a value; each must be printable.
    """
    return "\n".join(_lines(table, "", "", comments)).lstrip("\n") + "\n"


def is_table(value: object) -> TypeGuard[Table]:
    """Return whether a value is a TOML table."""
    return isinstance(value, dict)


def is_list_of_tables(value: object) -> TypeGuard[list[Table]]:
    """Return whether a value is a TOML array of tables, which an empty list is not."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return bool(items) and all(map(is_table, items))


def _lines(table: Table, key: str, name: str, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table, without its header: its values, then the tables below it."""
    dot = f"{key}." if key else ""
    for last, item in table.items():
        if not (is_table(item) and item) and not is_list_of_tables(item):
            comment = comments.get(f"{dot}{last}", "")
            yield f"{_key(last)} = {_value(item)}" + (f"  # {comment}" if comment else "")
    for last, item in table.items():
        path = f"{name}.{_key(last)}" if name else _key(last)
        if is_table(item) and item:
            yield f"\n[{path}]"
            yield from _lines(item, f"{dot}{last}", path, comments)
        elif is_list_of_tables(item):
            for index, entry in enumerate(item):
                yield f"\n[[{path}]]"
                yield from _lines(entry, f"{dot}{last}.{index}", path, comments)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in cast("list[object]", value)) + "]"
    if isinstance(value, float):
        return str(value)
    # Text, integers, booleans and {} are written as in JSON, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
