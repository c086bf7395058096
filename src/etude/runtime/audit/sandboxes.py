"""Sandboxes: what was created was destroyed, or is alive."""

from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally


def sandboxes_accounted(case: Case, tally: Tally) -> None:
    """Check that each sandbox was created and destroyed once; only the controller that is alive may have others."""
    facts = case.facts
    query = """
        SELECT made.sandbox, made.times, coalesce(gone.times, 0), made.position FROM (
            SELECT sandbox, count(*) AS times, max(position) AS position
            FROM sandbox_created JOIN writer USING (w) GROUP BY sandbox
        ) AS made LEFT JOIN (SELECT sandbox, count(*) AS times FROM sandbox_destroyed GROUP BY sandbox) AS gone
        USING (sandbox) ORDER BY made.sandbox
    """
    last = facts.one("SELECT max(position) FROM writer")
    alive = 0
    for sandbox, made, gone, position in facts.rows(query):
        if made != 1 or gone > 1:
            tally.check(f"{sandbox}: created {made} times, destroyed {gone} times")
        elif not gone and (case.sealed or position != last):
            tally.check(f"{sandbox}: created and never destroyed")
        else:
            alive += not gone
            tally.check()
    if alive:
        tally.note(f"{alive} sandboxes of the last controller are alive, or will be found by the next one")
    query = "SELECT sandbox FROM sandbox_destroyed WHERE sandbox NOT IN (SELECT sandbox FROM sandbox_created)"
    for (sandbox,) in facts.rows(query):
        tally.check(f"{sandbox}: destroyed, and nobody created it")
