"""The facts of a run in a temporary SQLite database: memory stays bounded however long the run was."""

import heapq
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from etude.errors import IntegrityError
from etude.telemetry.events import AnyEvent, Event

_BATCH = 2000
_SCALARS = (str, int, float, bool, float | None)

_LOOKED_UP = (
    ("admitted", "ticket"),
    ("applied", "w, n"),
    ("group_ready", "key"),
    ("mark", "w, events"),
    ("opened", "w"),
    ("published", "lineage, version"),
    ("rollout_ended", "session"),
    ("trained", "version"),
)

KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}
"""Kinds of facts by tag, which names their table."""

_SCHEMA = """
CREATE TABLE writer(
    w INTEGER PRIMARY KEY, name TEXT UNIQUE, service TEXT DEFAULT '', events INTEGER DEFAULT 0,
    torn INTEGER DEFAULT 0, damage TEXT DEFAULT '', closed INTEGER DEFAULT 0, cut INTEGER DEFAULT 0,
    position INTEGER DEFAULT -1, counted INTEGER DEFAULT 0
);
CREATE TABLE mark(w INTEGER, events INTEGER, chain TEXT);
CREATE TABLE seal(writer TEXT, events INTEGER, chain TEXT);
"""
"""`writer.position`: place in the chain of controllers; -1 for other services. `writer.counted`: facts that belong to
the run; what a controller may have recorded after another one went on from it does not. `mark`: the chain value after
so many facts. `seal`: where ledger/seal.json says that the newest seal lies."""


class _Table:
    """Rows of one kind of fact on their way into the database."""

    def __init__(self, tag: str, kind: type[Event]) -> None:
        fields = msgspec.structs.fields(kind)
        self.kind = kind
        self.names = [field.name for field in fields]
        self.packed = [place for place, field in enumerate(fields) if field.type not in _SCALARS]
        columns = ", ".join(f'"{name}"' for name in self.names)
        self.create = f'CREATE TABLE "{tag}"(w INTEGER, n INTEGER, {columns})'
        places = ", ".join("?" * (len(self.names) + 2))
        self.insert = f'INSERT INTO "{tag}" VALUES({places})'
        self.rows: list[tuple[Any, ...]] = []

    def take(self, w: int, n: int, event: Event) -> None:
        values = msgspec.structs.astuple(event)
        if self.packed:
            unpacked = list(values)
            for place in self.packed:
                unpacked[place] = msgspec.json.encode(unpacked[place]).decode()
            values = unpacked
        self.rows.append((w, n, *values))

    def fact(self, values: Sequence[Any]) -> Event:
        """Return the fact again."""
        fields = dict(zip(self.names, values, strict=True))
        for place in self.packed:
            fields[self.names[place]] = msgspec.json.decode(fields[self.names[place]])
        return msgspec.convert(fields, self.kind, strict=False)


class Facts:
    """All facts, one table per kind: `w` (writer), `n` (place in its ledger), then the fact's fields.

    Fields that are no plain values are JSON. Rooms of the audit add tables of their own with what they saw.
    """

    def __init__(self, path: Path, *, cache_kib: int = 32 << 10) -> None:
        """Keep them at `path`, with so much of it in memory."""
        self.sql = sqlite3.connect(path, isolation_level=None)
        self.sql.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA locking_mode=EXCLUSIVE; PRAGMA temp_store=FILE;"
            f"PRAGMA cache_size=-{cache_kib}; BEGIN;{_SCHEMA}"
        )
        self._tables = {kind: _Table(tag, kind) for tag, kind in KINDS.items()}
        for table in self._tables.values():
            self.sql.execute(table.create)

    def close(self) -> None:
        """Let go of the database."""
        self.sql.close()

    def writer(self, name: str) -> int:
        """Return the number of a writer, which is new."""
        number = self.one("SELECT count(*) FROM writer")
        self.sql.execute("INSERT INTO writer(w, name) VALUES(?, ?)", (number, name))
        return number

    def add(self, w: int, n: int, event: Event) -> None:
        """Take a fact; raise `IntegrityError` for a number that no fact can hold."""
        table = self._tables[type(event)]
        table.take(w, n, event)
        if len(table.rows) >= _BATCH:
            self._write(table)

    def mark(self, w: int, events: int, chain: str) -> None:
        """Keep the chain value after so many facts of a writer."""
        self.sql.execute("INSERT INTO mark VALUES(?, ?, ?)", (w, events, chain))

    def end_writer(
        self, w: int, *, events: int, torn: int = 0, damage: str = "", closed: bool = False, cut: bool = False
    ) -> None:
        """Keep how a ledger ended; `cut` means that its writer closed it, but its very end is missing."""
        query = "UPDATE writer SET events = ?, torn = ?, damage = ?, closed = ?, cut = ? WHERE w = ?"
        self.sql.execute(query, (events, torn, damage, closed, cut, w))

    def flush(self) -> None:
        """Make all facts so far visible to queries."""
        for table in self._tables.values():
            self._write(table)

    def index(self) -> None:
        """Make the facts that others are looked up by quick to find."""
        for name, columns in _LOOKED_UP:
            self.sql.execute(f"CREATE INDEX {name}_of ON {name}({columns})")

    def rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a query one by one."""
        return iter(self.sql.execute(query, values))

    def one(self, query: str, *values: object) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first value of the first row; None when there is none."""
        row = self.sql.execute(query, values).fetchone()
        return None if row is None else row[0]

    def control(self, *kinds: type[Event]) -> Iterator[Event]:
        """Return facts of these kinds in the order in which the run's controllers recorded them."""
        for _, _, _, event in heapq.merge(*(self._ordered(kind) for kind in kinds), key=lambda item: item[:2]):
            yield event

    def _ordered(self, kind: type[Event]) -> Iterator[tuple[int, int, str, Event]]:
        table = self._tables[kind]
        columns = ", ".join(f'"{name}"' for name in table.names)
        tag = kind.__struct_config__.tag
        query = (
            f'SELECT position, n, {columns} FROM "{tag}" JOIN writer USING (w) WHERE position >= 0 ORDER BY position, n'
        )
        for row in self.rows(query):
            yield row[0], row[1], str(tag), table.fact(row[2:])

    def _write(self, table: _Table) -> None:
        rows, table.rows = table.rows, []
        try:
            self.sql.executemany(table.insert, rows)
        except OverflowError as error:
            msg = f"a fact holds a number that is out of range ({error}); restore the ledger from a copy"
            raise IntegrityError(msg) from error
