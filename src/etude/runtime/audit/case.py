"""What the invariants are checked on: a run's facts, and what was seen in its directory."""

from collections.abc import Callable
from functools import cached_property

import msgspec

from etude.config import RunConfig
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.findings import Tally
from etude.tasks.source import SeededTaskSource
from etude.weight_types import Head


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Files that are replaced as the run goes on, read before the ledger: what they say is a fact already."""

    config: RunConfig | None = None
    """None when run.toml is missing or damaged."""
    head: Head | None = None
    summary: bytes | None = None
    pointer: bytes | None = None
    """checkpoints/latest.json."""


class Case:
    """The evidence, and how much of it is final."""

    def __init__(
        self, facts: Facts, snapshot: Snapshot, *, tasks: SeededTaskSource | None = None, lags: bool = False
    ) -> None:
        """All facts are in, and the controllers have their positions (`chain.order_controllers`).

        `tasks` is the run's source at its beginning; None when the task set cannot be known. `lags` says that ledgers
        of processes that are alive come into the run directory with a delay.
        """
        self.facts = facts
        self.snapshot = snapshot
        self.tasks = tasks
        self._lags = lags
        self.under_way: tuple[int, ...] = ()
        """Tickets taken for a step that is not made yet, in order."""

    @cached_property
    def last_controller(self) -> int:
        """Number of the writer that controls the run, or did; -1 before the first."""
        return self.facts.one("SELECT coalesce((SELECT w FROM writer ORDER BY position DESC LIMIT 1), -1)")

    @cached_property
    def sealed(self) -> bool:
        """Whether the last command ended in order: then nothing is open, and every file is claimed."""
        return bool(self.facts.one("SELECT count(*) FROM sealed WHERE w = ?", self.last_controller))

    @property
    def behind(self) -> bool:
        """Whether a ledger may miss facts that others depend on already: those of a run in a bucket that goes on."""
        return self._lags and not self.sealed

    def is_late(self, kind: str, what: str) -> bool:
        """Whether something was recorded after its ledger was read (`intake.load_late`)."""
        return bool(self.facts.one("SELECT count(*) FROM late WHERE kind = ? AND what = ?", kind, what))

    @cached_property
    def crashed(self) -> bool:
        """Whether a process of the run may have died, so that what it was about to do was left half done."""
        closed = "SELECT count(*) FROM writer WHERE events > 0 AND NOT closed"
        return not self.sealed or bool(self.facts.one(closed))


class Invariant(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must hold."""

    name: str
    meaning: str
    check: Callable[[Case, Tally], None]
