"""What a run directory says about its run, read for people: whatever is odd or damaged is left out and named."""

import asyncio
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from etude.errors import ObjectMissingError, StoreError
from etude.evaluation.suite import EvalReport
from etude.interfaces import ObjectStore
from etude.rollout.atif import Document
from etude.store.opening import open_store

MAX_METRICS_BYTES = 256 << 20
MAX_OBJECT_BYTES = 16 << 20

Row = dict[str, Any]
"""One line of metrics: `step`, `version`, `time`, `stage` and metrics by name; nothing of it is sure."""

_Record = TypeVar("_Record")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation in short."""

    pass_rate: float | None = None
    attempts: int | None = None
    """Per task."""
    tasks: int | None = None
    interval: tuple[float, float] | None = None
    """95 %."""
    version: int | None = None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json, as far as it is shown."""

    seconds: float | None = None
    """Of the whole run."""
    stages: dict[str, float] = {}
    """Seconds by stage."""
    eval: dict[str, Measured] = {}
    """`before` and `after` training."""
    seed: int | None = None

    def pass_rate(self, when: str) -> float | None:
        """Return the pass rate `before` or `after` training, None where it was not measured."""
        return self.eval[when].pass_rate if when in self.eval else None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was read back."""

    name: str
    """`<group>/<index>`: what `etude show` takes."""
    document: Document


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its directory describes it; every part may be empty."""

    config: str = ""
    """Text of run.toml: the resolved configuration with the origin of each value."""
    rows: tuple[Row, ...] = ()
    summary: RunSummary = RunSummary()
    evals: tuple[EvalReport, ...] = ()
    """By version."""
    rollout_names: tuple[str, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    """Those that were asked for."""
    unreadable: tuple[str, ...] = ()
    """What is there but could not be read, and why."""

    def setting(self, *path: str) -> object:
        """Return a value of the configuration, or None."""
        try:
            value: object = tomllib.loads(self.config)
        except tomllib.TOMLDecodeError:
            return None
        for part in path:
            value = cast("dict[str, object]", value).get(part) if isinstance(value, dict) else None
        return value


def open_run(url: str) -> ObjectStore:
    """Return the store of a run that is there already; raise `StoreError` for a directory that is not."""
    path = url.removeprefix("file://")
    if "://" not in path and not Path(path).is_dir():
        msg = f"there is no run directory at {path}; give the value of run.url"
        raise StoreError(msg)
    return open_store(url)


async def load_run(store: ObjectStore, *, rollouts: int | Sequence[str] = 0) -> RunView:
    """Return what is known of a run.

    Args:
        store: The run directory.
        rollouts: Names of the rollouts to read, or how many to choose from all over the run.

    Raises:
        StoreError: There is no run in this directory.
    """
    reader = _Reader(store)
    config = await reader.text("run.toml")
    rows = [row for key in ("metrics.jsonl", *await store.list("metrics")) for row in await reader.rows(key)]
    summary = await reader.record("summary.json", RunSummary)
    names = await rollout_names(store)
    if not (config or rows or summary or names):
        msg = "there is no run here: neither run.toml nor metrics.jsonl, summary.json or rollouts/ exist"
        raise StoreError(f"{msg}; give the directory that run.url named")
    wanted = _spread(names, rollouts) if isinstance(rollouts, int) else rollouts
    reports = [
        await reader.record(key, EvalReport) for key in await store.list("evals") if key.endswith("/report.json")
    ]
    chosen = await reader.rollouts(wanted)
    return RunView(
        config=config,
        rows=tuple(rows),
        summary=summary or RunSummary(),
        evals=tuple(sorted((report for report in reports if report), key=lambda report: report.version)),
        rollout_names=tuple(names),
        rollouts=chosen,
        unreadable=tuple(reader.unreadable),
    )


async def rollout_names(store: ObjectStore) -> list[str]:
    """Return the names of all rollouts of a run, group by group."""
    keys = [key for key in await store.list("rollouts") if key.endswith(".json")]
    return sorted((key.removeprefix("rollouts/").removesuffix(".json") for key in keys), key=_by_group_and_index)


async def load_rollouts(store: ObjectStore, names: Sequence[str]) -> RunView:
    """Return a view of nothing but these rollouts."""
    reader = _Reader(store)
    return RunView(rollouts=await reader.rollouts(names), unreadable=tuple(reader.unreadable))


class _Reader:
    """Reads objects that may be missing, too large or damaged, and remembers which were."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.unreadable: list[str] = []

    async def bytes(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """Return an object's bytes, or nothing."""
        try:
            return await self._store.get(key, max_bytes=max_bytes)
        except ObjectMissingError:
            return b""
        except StoreError as error:
            self.unreadable.append(f"{key}: {error}")
            return b""

    async def text(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> str:
        """Return an object as text, or nothing."""
        return (await self.bytes(key, max_bytes=max_bytes)).decode("utf-8", "replace")

    async def record(self, key: str, kind: type[_Record]) -> _Record | None:
        """Return an object decoded from JSON, or None."""
        encoded = await self.bytes(key)
        if not encoded:
            return None
        try:
            return msgspec.json.decode(encoded, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.unreadable.append(f"{key}: {error}")
            return None

    async def rollouts(self, names: Sequence[str]) -> tuple[Rollout, ...]:
        """Return the rollouts with these names that can be read."""
        documents = await asyncio.gather(*(self.record(f"rollouts/{name}.json", Document) for name in names))
        found = zip(names, documents, strict=True)
        return tuple(Rollout(name=name, document=document) for name, document in found if document is not None)

    async def rows(self, key: str) -> list[Row]:
        """Return the lines of an object that are JSON objects; what follows the last line break was torn by a crash."""
        rows: list[Row] = []
        lines = (await self.bytes(key, max_bytes=MAX_METRICS_BYTES)).split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.unreadable.append(f"{key}, line {number}: {error}")
        return rows


def _by_group_and_index(name: str) -> tuple[str, int, str]:
    """Sort attempt 10 behind attempt 9."""
    group, _, index = name.rpartition("/")
    digits = index.partition("r")[0]
    return (group, int(digits) if digits.isdecimal() else 0, index)


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Return up to `count` names, evenly spread, the first and the last among them."""
    if len(names) <= count or count <= 1:
        return list(names[:count])
    return [names[place * (len(names) - 1) // (count - 1)] for place in range(count)]
