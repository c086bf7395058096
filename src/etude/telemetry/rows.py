"""A row of metrics as a line of JSON, and lines back to rows."""

import math
from collections.abc import Mapping

import msgspec

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore

MAX_ROW_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Row = dict[str, object]


def encode_row(row: Mapping[str, object], *, time: float) -> bytes:
    """Return one line of JSON, its `step`, `version` and `time` first.

    Infinities and NaN, which JSON lacks, become the strings `inf`, `-inf` and `nan`: a loss that is not a number must
    not look like one that was not measured. Raise `ValueError` for a row without step and version, or a huge one.
    """
    if not all(isinstance(row.get(name), int) for name in ("step", "version")):
        msg = f"a row of metrics needs an integer step and version; it has {sorted(row)[:20]}"
        raise ValueError(msg)
    ordered = {"step": row["step"], "version": row["version"], "time": time} | dict(row)
    line = msgspec.json.encode({name: json_value(value) for name, value in ordered.items()}) + b"\n"
    if len(line) > MAX_ROW_BYTES:
        msg = f"a row of metrics has {len(line)} bytes, more than {MAX_ROW_BYTES}; put large things into files"
        raise ValueError(msg)
    return line


def json_value(value: object) -> object:
    """Return what JSON can hold of a value: a number that is not finite becomes a string."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_rows(data: bytes, *, place: str) -> list[Row]:
    """Return the rows of a file; a last line without its end, which a killed writer leaves, is not a row.

    Raise `IntegrityError` for any other line that is not a JSON object; `place` names the file.
    """
    lines = data.split(b"\n")[:-1]
    return [_row(line, f"{place}, line {number}") for number, line in enumerate(lines, start=1)]


async def read_rows(store: ObjectStore, prefix: str) -> list[Row]:
    """Return all rows under a folder of the run, in the order of its files; empty while there is none."""
    rows: list[Row] = []
    for key in await store.list(prefix):
        try:
            rows += decode_rows(await store.get(key, max_bytes=MAX_FILE_BYTES), place=key)
        except ObjectMissingError:
            continue  # listed, and gone since
    return rows


def _row(line: bytes, place: str) -> Row:
    try:
        row = msgspec.json.decode(line, type=Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{place} is not a row of metrics ({error}); delete that line and start again"
        raise IntegrityError(msg) from error
    return {name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
