"""Finished groups as Parquet: one row per model call, columns that people query with any Parquet tool.

A rollout without calls has one row whose `node_id` is null; what belongs to a rollout or to the group is repeated on
each of its rows. Per-token columns are lists, so `unnest` in DuckDB gives one row per token.
"""
# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import IntegrityError
from etude.store.group_columns import (
    ADDED_COLUMNS,
    BYTE_COLUMNS,
    GROUP_COLUMNS,
    NODE_COLUMNS,
    ROLLOUT_COLUMNS,
    SCHEMA,
    check_completion,
    node_fields,
    rollout_fields,
)
from etude.store.keys import check_key
from etude.types import Group, Node, Trajectory

MAX_FILE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 8 << 30
MAX_ROWS = 1 << 20

_OLDER_SCHEMA = pa.schema([field for field in SCHEMA if field.name not in ADDED_COLUMNS])


def group_key(version: int, group_id: str) -> str:
    """Return where a group lies that was trained into `version`."""
    return check_key(f"groups/{version}/{group_id}.parquet")


def encode_group(group: Group, advantages: Sequence[float | None]) -> bytes:
    """Return the file of a finished group and its advantages, one per trajectory (None: not trained).

    Raise `ValueError` for a group that breaks its own rules: none or two trajectories of one id, arrays that do not fit
    each other, ids beyond 32 bits.
    """
    _check(group, advantages)
    rows = [
        (trajectory, advantage, node)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        for node in trajectory.nodes or (None,)
    ]
    values: dict[str, list[Any]] = {name: [read(group)] * len(rows) for name, (_, read) in GROUP_COLUMNS.items()}
    values["advantage"] = [advantage for _, advantage, _ in rows]
    values |= {name: [read(trajectory) for trajectory, _, _ in rows] for name, (_, read) in ROLLOUT_COLUMNS.items()}
    values |= {
        name: [None if node is None else read(node) for _, _, node in rows] for name, (_, read) in NODE_COLUMNS.items()
    }
    try:
        arrays = [_array(values[field.name], field) for field in SCHEMA]
    except (pa.ArrowException, OverflowError) as error:
        msg = f"group {group.group_id!r} holds a number that its column cannot: {error}"
        raise ValueError(msg) from error
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=SCHEMA), sink, compression="zstd", write_page_checksum=True, version="2.6"
    )
    return sink.getvalue().to_pybytes()


def decode_group(data: bytes) -> Group:
    """Return the group of a file; raise `IntegrityError` when it is damaged or not of this kind."""
    rows = _rows(data)
    try:
        return _group(rows)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        msg = f"a group's file contradicts itself: {error}; leave it out"
        raise IntegrityError(msg) from error


def decode_advantages(data: bytes) -> tuple[float | None, ...]:
    """Return the advantages of a file, one per trajectory in order; errors as in `decode_group`."""
    rows = _rows(data)
    firsts = [next(same) for _, same in groupby(rows, key=lambda row: row["rollout_id"])]
    return tuple(row["advantage"] for row in firsts)


def _check(group: Group, advantages: Sequence[float | None]) -> None:
    place = f"group {group.group_id!r}"
    if not group.trajectories or len(advantages) != len(group.trajectories):
        msg = f"{place} has {len(group.trajectories)} trajectories and {len(advantages)} advantages"
        raise ValueError(msg)
    if len({trajectory.rollout_id for trajectory in group.trajectories}) != len(group.trajectories):
        msg = f"{place} has two trajectories of one rollout_id"
        raise ValueError(msg)
    for trajectory in group.trajectories:
        if (trajectory.group_id, trajectory.task_id) != (group.group_id, group.task_id):
            msg = f"{place} has rollout {trajectory.rollout_id!r} of group {trajectory.group_id!r}"
            raise ValueError(msg)
        for node in trajectory.nodes:
            check_completion(node.completion)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    if field.name not in BYTE_COLUMNS:
        return pa.array(values, field.type)
    item = field.type.value_type
    offsets: list[int | None] = []
    end = 0
    for value in values:
        offsets.append(None if value is None else end)
        end += len(value or b"") * 8 // item.bit_width
    offsets.append(end)
    buffer = pa.py_buffer(b"".join(value or b"" for value in values))
    items = pa.Array.from_buffers(item, end, [None, buffer])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)


def _rows(data: bytes) -> list[dict[str, Any]]:
    """Return the rows with every claim about sizes checked before anything is unpacked."""
    if len(data) > MAX_FILE_BYTES:
        msg = f"a group's file has {len(data)} bytes, more than {MAX_FILE_BYTES}; leave it out"
        raise IntegrityError(msg)
    try:
        file = pq.ParquetFile(
            pa.BufferReader(data),
            page_checksum_verification=True,
            thrift_string_size_limit=1 << 20,
            thrift_container_size_limit=1 << 20,
        )
        _check_claims(file)
        table = file.read(use_threads=False).combine_chunks()
        table.validate(full=True)
        columns = {name: _values(table.column(name), name) for name in table.column_names}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        msg = f"a group's file is damaged ({str(error)[:200]}); leave it out"
        raise IntegrityError(msg) from error
    absent = dict.fromkeys(ADDED_COLUMNS)
    return [absent | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check_claims(file: pq.ParquetFile) -> None:
    # Not column by column: looking at a column whose statistics are damaged ends the process (pyarrow 26).
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    fits = (
        0 < file.metadata.num_rows <= MAX_ROWS
        and any(map(file.schema_arrow.equals, (SCHEMA, _OLDER_SCHEMA)))
        and all(group.total_byte_size >= 0 for group in groups)
        and sum(group.total_byte_size for group in groups) <= MAX_UNPACKED_BYTES
    )
    if not fits:
        msg = "a group's file has other columns than a group, no rows, or claims too much; leave it out"
        raise IntegrityError(msg)


def _values(column: pa.ChunkedArray, name: str) -> list[Any]:
    array = column.combine_chunks()
    if name not in BYTE_COLUMNS:
        return array.to_pylist()
    items = array.flatten()
    if items.null_count:
        msg = f"a group's file has nulls within {name}; leave it out"
        raise IntegrityError(msg)
    size = items.type.bit_width // 8
    data = items.buffers()[1]
    packed = b"" if data is None else data.to_pybytes()[items.offset * size : (items.offset + len(items)) * size]
    values: list[bytes | None] = []
    start = 0
    for length in array.value_lengths().to_pylist():
        end = start + (length or 0) * size
        values.append(None if length is None else packed[start:end])
        start = end
    return values


def _group(rows: list[dict[str, Any]]) -> Group:
    facts = {tuple(row[name] for name in GROUP_COLUMNS) for row in rows}
    if len(facts) != 1:
        msg = f"{len(facts)} groups in one file"
        raise ValueError(msg)
    trajectories = [
        _trajectory(list(same)) for _, same in groupby(rows, key=lambda row: (row["rollout_id"], row["index"]))
    ]
    fields = dict(zip(GROUP_COLUMNS, facts.pop(), strict=True))
    return msgspec.structs.replace(
        msgspec.convert({**fields, "trajectories": []}, Group), trajectories=tuple(trajectories)
    )


def _trajectory(rows: list[dict[str, Any]]) -> Trajectory:
    nodes = [
        msgspec.convert(node_fields(row), Node, builtin_types=(bytes,)) for row in rows if row["node_id"] is not None
    ]
    for node in nodes:
        check_completion(node.completion)
    bare = msgspec.convert(rollout_fields(rows[0]), Trajectory)
    return msgspec.structs.replace(bare, nodes=tuple(nodes))
