"""What `etude verify` says: one finding per invariant."""

from collections import Counter

import msgspec

FIRST_FEW = 5
"""Offending things that a finding names."""
_MAX_TEXT = 300


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one invariant."""

    name: str
    """Stable: scripts may rely on it."""
    meaning: str
    checked: int
    """Things that were looked at."""
    violations: int
    first: tuple[str, ...] = ()
    """The first offending things, each with what is wrong."""
    notes: tuple[str, ...] = ()
    """What could not be judged, and what a crash explains."""


class Tally:
    """Counts what one invariant looked at, and what did not hold."""

    def __init__(self, name: str, meaning: str) -> None:
        self._name = name
        self._meaning = meaning
        self._checked = 0
        self._violations = 0
        self._first: list[str] = []
        self._notes: Counter[str] = Counter()

    def check(self, problem: str = "") -> None:
        """Count one more thing; `problem` names it and says what is wrong, empty when all is well."""
        self._checked += 1
        if problem:
            self.violate(problem)

    def checked(self, count: int) -> None:
        """Count things that were looked at by a query that only returns the offending ones."""
        self._checked += count

    def violate(self, problem: str) -> None:
        """Count a violation of something that is counted already."""
        self._violations += 1
        if len(self._first) < FIRST_FEW:
            self._first.append(problem[:_MAX_TEXT])

    def note(self, text: str) -> None:
        """Keep what a reader should know though nothing is wrong; equal notes are counted."""
        self._notes[text] += 1

    def finding(self) -> Finding:
        """Return the result."""
        return Finding(
            name=self._name,
            meaning=self._meaning,
            checked=self._checked,
            violations=self._violations,
            first=tuple(self._first),
            notes=tuple(text if count == 1 else f"{text} ({count} times)" for text, count in self._notes.items()),
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit of a run found."""

    run: str
    state: str
    """`sealed`: the last command ended in order. `open`: it goes on, or was killed."""
    seal: str = ""
    """Chain value of the last controller's ledger; given to `etude verify --seal` later, no forgery passes."""
    findings: tuple[Finding, ...]
    totals: dict[str, dict[str, int]] = {}
    """What became of tasks, tokens and rollouts, by reason."""
    ledger_facts: int = 0
    files: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether there was no violation."""
        return not any(finding.violations for finding in self.findings)
