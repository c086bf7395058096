"""The ledgers themselves: whole, in one chain of controllers, each of them known to another."""

from etude.runtime.audit.case import Case
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.findings import Tally

_CLAIMS = """
SELECT w, writer, events, chain, 1 AS final FROM service_ended WHERE chain <> ''
UNION ALL SELECT w, after, after_events, after_chain, 0 FROM opened WHERE after_chain <> ''
UNION ALL SELECT w, entry.key, json_extract(entry.value, '$[0]'), json_extract(entry.value, '$[1]'), 1
FROM sealed, json_each(sealed.writers) AS entry
"""
"""What a ledger says of another one: facts and chain value, and whether that was its end."""


def order_controllers(facts: Facts) -> None:
    """Give the controllers their positions: each names the one it goes on from."""
    facts.sql.execute(
        "UPDATE writer SET service = coalesce((SELECT service FROM opened WHERE opened.w = writer.w), '')"
    )
    facts.sql.execute("UPDATE writer SET counted = events")
    last, position = "", 0
    while (number := _next(facts, last)) is not None:
        facts.sql.execute("UPDATE writer SET position = ? WHERE w = ?", (position, number))
        counted = facts.one("SELECT after_events FROM opened WHERE w = ?", number)
        facts.sql.execute("UPDATE writer SET counted = min(events, ?) WHERE name = ?", (counted, last))
        last, position = facts.one("SELECT name FROM writer WHERE w = ?", number), position + 1


def _next(facts: Facts, last: str) -> int | None:
    return facts.one(
        "SELECT w FROM opened JOIN writer USING (w) WHERE opened.service = 'controller' AND position < 0 AND after = ?",
        last,
    )


def ledger_intact(case: Case, tally: Tally) -> None:
    """Check every chain, and what others say of it."""
    facts = case.facts
    killed = "SELECT writer FROM service_ended WHERE reason <> ''"
    query = f"SELECT name, events, torn, damage, cut AND name NOT IN ({killed}) FROM writer ORDER BY name"
    for name, events, torn, damage, cut in facts.rows(query):
        tally.checked(events)
        if damage:
            tally.violate(damage)
        elif cut:
            tally.violate(f"{name}: it was closed in order, and its last bytes are missing")
        elif torn:
            tally.note(f"{name}: {torn} bytes after the last whole batch were cut, as a kill leaves them")
    query = (
        "SELECT claim.writer, claim.events, claim.final, known.events, mark.chain = claim.chain, by.name "
        f"FROM ({_CLAIMS}) AS claim JOIN writer AS by ON by.w = claim.w "
        "JOIN writer AS known ON known.name = claim.writer "
        "LEFT JOIN mark ON mark.w = known.w AND mark.events = claim.events"
    )
    for name, said, final, found, same, by in facts.rows(query):
        if said > found:
            tally.check(f"{name}: {by} found {said} facts, now there are {found}")
        elif same != 1:
            tally.check(f"{name}: after {said} facts its chain value is not the one that {by} found")
        else:
            tally.check(
                f"{name}: it grew from {said} to {found} facts after {by} saw its end" if final and said < found else ""
            )
    if case.sealed and facts.one("SELECT closed FROM writer WHERE w = ?", case.last_controller):
        tally.check("" if facts.one("SELECT count(*) FROM seal") else "ledger/seal.json is gone; the run was sealed")
    query = (
        "SELECT writer, mark.chain = seal.chain FROM seal LEFT JOIN writer ON writer.name = seal.writer "
        "LEFT JOIN mark ON mark.w = writer.w AND mark.events = seal.events"
    )
    for name, same in facts.rows(query):
        tally.check("" if same == 1 else f"{name}: the seal that ledger/seal.json speaks of is gone, or another one")


def controllers_form_a_chain(case: Case, tally: Tally) -> None:
    """Check that every controller but the first goes on from exactly one other."""
    facts = case.facts
    query = "SELECT name, position, after FROM opened JOIN writer USING (w) WHERE opened.service = 'controller'"
    for name, position, after in facts.rows(query + " ORDER BY position"):
        if position >= 0:
            tally.check()
        elif facts.one("SELECT count(*) FROM writer WHERE name = ? AND position >= 0", after):
            tally.check(f"{name}: goes on from {after}, as another controller does")
        else:
            tally.check(f"{name}: goes on from {after or 'nothing, as another controller does'}")
    for name, count, first in facts.rows("SELECT name, count(*), min(n) FROM opened JOIN writer USING (w) GROUP BY w"):
        tally.check(f"{name}: its first fact is not `opened`, or there are {count}" if (count, first) != (1, 0) else "")
    query = "SELECT name FROM writer WHERE events > 0 AND w NOT IN (SELECT w FROM opened)"
    for (name,) in facts.rows(query):
        tally.check(f"{name}: its first fact is not `opened`")


def writers_known(case: Case, tally: Tally) -> None:
    """Check that every ledger is named by another one, and every ledger that is named is there."""
    facts = case.facts
    named = (
        "SELECT writer FROM service_started UNION SELECT after FROM opened UNION SELECT writer FROM service_ended "
        "UNION SELECT entry.key FROM sealed, json_each(sealed.writers) AS entry"
    )
    query = f"SELECT name, name IN ({named}), service FROM writer WHERE w <> ? ORDER BY name"
    for name, known, service in facts.rows(query, case.last_controller):
        if not known and case.crashed and service != "controller":
            tally.check()
            tally.note("a ledger that no controller names: its process started as the controller died")
        else:
            tally.check("" if known else f"{name}: no other ledger knows it")
    missing = (
        "SELECT claim.writer, by.name, claim.events "
        f"FROM ({_CLAIMS}) AS claim JOIN writer AS by ON by.w = claim.w "
        "WHERE claim.events > 0 AND claim.writer NOT IN (SELECT name FROM writer) GROUP BY claim.writer"
    )
    for name, by, events in facts.rows(missing):
        tally.check(f"{name}: the ledger is gone; {by} found {events} facts in it")
