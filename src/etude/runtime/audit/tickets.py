"""What the run's controllers say became of each ticket, folded in the order in which they said it."""

from collections.abc import Iterator

import msgspec

from etude.runtime.audit.facts import Facts
from etude.telemetry.events import (
    Admitted,
    GroupLost,
    GroupReady,
    GroupTaken,
    LineageOpened,
    Resumed,
    VersionMade,
)

IN_FLIGHT, READY, TAKEN = "in flight", "ready", "taken"

_SCHEMA = """
CREATE TABLE step(lineage TEXT, version INTEGER, step INTEGER, tickets TEXT, survives INTEGER DEFAULT 1);
CREATE TABLE fate(ticket INTEGER, fate TEXT, reason TEXT, version INTEGER);
CREATE INDEX step_of ON step(version);
CREATE INDEX fate_of ON fate(ticket);
CREATE TABLE breach(rule TEXT, what TEXT);
"""
"""`step`: optimizer steps that the controllers recorded; those of versions that were given up do not survive, and of
one that was under way then only the groups are known. `fate`: what a ticket came to at last. `breach`: what contradicts
the rules."""


class _Ticket(msgspec.Struct):
    """A ticket that may still change."""

    state: str = IN_FLIGHT


class TicketFold:
    """Follows open tickets; memory grows with the slots of the run, not with its length."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        facts.sql.executescript(_SCHEMA + "BEGIN;")
        self._open: dict[int, _Ticket] = {}
        self._taken: list[int] = []
        self._next = 0
        self._lineage = ""
        self.version = 0
        """That the step being built starts from."""

    def run(self) -> None:
        """Fold everything."""
        kinds = (Admitted, GroupReady, GroupLost, GroupTaken, VersionMade, LineageOpened, Resumed)
        for event in self._facts.control(*kinds):
            match event:
                case Admitted():
                    self._admit(event)
                case GroupReady():
                    self._move(event.ticket, IN_FLIGHT, READY, "finished")
                case GroupLost():
                    self._lose(event)
                case GroupTaken():
                    self._take(event)
                case VersionMade():
                    self._make(event)
                case LineageOpened():
                    self._lineage = event.lineage
                case Resumed():
                    self._resume(event)
                case _:
                    pass
        for ticket, known in self._open.items():
            self._end(ticket, "open", known.state)

    @property
    def under_way(self) -> tuple[int, ...]:
        """Tickets taken for the step that is not made yet, in order."""
        return tuple(self._taken)

    def _breach(self, rule: str, what: str) -> None:
        self._facts.sql.execute("INSERT INTO breach VALUES(?, ?)", (rule, what))

    def _end(self, ticket: int, fate: str, reason: str, version: int | None = None) -> None:
        self._facts.sql.execute("INSERT INTO fate VALUES(?, ?, ?, ?)", (ticket, fate, reason, version))

    def _admit(self, event: Admitted) -> None:
        if event.ticket != self._next:
            self._breach("tasks", f"ticket {event.ticket} was admitted where {self._next} was due")
        self._next = max(self._next, event.ticket + 1)
        self._open[event.ticket] = _Ticket()

    def _move(self, number: int, before: str, state: str, what: str) -> bool:
        ticket = self._open.get(number)
        if ticket is None or ticket.state != before:
            self._breach("groups", f"ticket {number} is {what} though it is {ticket.state if ticket else 'not open'}")
            return False
        ticket.state = state
        return True

    def _lose(self, event: GroupLost) -> None:
        if self._open.pop(event.ticket, None) is None:
            self._breach("tasks", f"ticket {event.ticket} is lost ({event.reason}) though it is not open")
        elif not event.reason:
            self._breach("tasks", f"ticket {event.ticket} is lost without a reason")
        if event.ticket in self._taken:
            self._taken.remove(event.ticket)
        self._end(event.ticket, "lost", event.reason)

    def _take(self, event: GroupTaken) -> None:
        if event.version != self.version:
            self._breach(
                "groups", f"ticket {event.ticket} is taken for a step from version {event.version}, not {self.version}"
            )
        if self._move(event.ticket, READY, TAKEN, "taken"):
            self._taken.append(event.ticket)

    def _make(self, event: VersionMade) -> None:
        if event.version != self.version + 1:
            self._breach("versions", f"version {event.version} is made after version {self.version}")
        self.version, self._lineage = event.version, event.lineage
        taken, self._taken = self._taken, []
        tickets = msgspec.json.encode(taken).decode()
        self._facts.sql.execute(
            "INSERT INTO step(lineage, version, step, tickets) VALUES(?, ?, ?, ?)",
            (event.lineage, event.version, event.step, tickets),
        )
        for ticket in taken:
            self._open.pop(ticket, None)
            self._end(ticket, "trained", "", event.version)

    def _resume(self, event: Resumed) -> None:
        """Go back to what the trainer could repeat, then take up what is to be played again."""
        last = event.step + event.replayed
        given_up: list[int] = []
        if last < self.version:
            for (tickets,) in list(self._facts.rows("SELECT tickets FROM step WHERE version > ? AND survives", last)):
                given_up += msgspec.json.decode(tickets, type=list[int])
            self._facts.sql.execute("UPDATE step SET survives = 0 WHERE version > ?", (last,))
            self._note_under_way()
            self.version = last
        if sorted(given_up) != sorted(event.returned):
            self._breach(
                "groups", f"tickets {event.returned} come back from versions given up, {given_up} were in them"
            )
        for ticket in given_up:
            self._facts.sql.execute("DELETE FROM fate WHERE ticket = ?", (ticket,))
            self._open[ticket] = _Ticket(state=READY)
        for ticket in event.restarted:
            self._restart(ticket)

    def _note_under_way(self) -> None:
        """Give up the step that is being built: its groups wait again."""
        taken, self._taken = self._taken, []
        if taken:
            tickets = msgspec.json.encode(taken).decode()
            row = (self._lineage, self.version + 1, tickets)
            self._facts.sql.execute("INSERT INTO step(lineage, version, tickets, survives) VALUES(?, ?, ?, 0)", row)
        for ticket in taken:
            self._open[ticket].state = READY

    def _restart(self, number: int) -> None:
        """Play a group again: its file never was, or is gone."""
        if number not in self._open:
            self._breach("tasks", f"ticket {number} is played again though it is not open")
            return
        self._open[number].state = IN_FLIGHT
        if number in self._taken:
            self._taken.remove(number)


def steps(facts: Facts) -> Iterator[tuple[str, int, int, list[int]]]:
    """Return lineage, version, step and tickets in order of every recorded step, those that were given up included."""
    query = "SELECT lineage, version, step, tickets FROM step WHERE step IS NOT NULL ORDER BY version, rowid"
    for lineage, version, step, tickets in facts.rows(query):
        yield lineage, version, step, msgspec.json.decode(tickets, type=list[int])
