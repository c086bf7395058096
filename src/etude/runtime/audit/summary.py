"""summary.json and evals/: what people read, against what was recorded."""

import msgspec

from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally
from etude.runtime.directory import SUMMARY_KEY, Summary

_SECONDS = 0.011
"""summary.json has two digits."""


def summary_follows_from_facts(case: Case, tally: Tally) -> None:
    """Check that stages and evaluations in summary.json are those that the ledger says."""
    data = case.snapshot.summary
    facts = case.facts
    if data is None:
        recorded = facts.one("SELECT count(*) FROM stage_ended")
        tally.check(f"{SUMMARY_KEY}: missing, though stages have ended" if case.sealed and recorded else "")
        return
    try:
        summary = msgspec.json.decode(data, type=Summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        tally.check(f"{SUMMARY_KEY}: damaged ({error})")
        return
    stages = dict(facts.rows("SELECT stage, seconds FROM stage_ended JOIN writer USING (w) ORDER BY position, n"))
    for stage, seconds in summary.stages.items():
        known = stages.pop(stage, None)
        same = known is not None and abs(known - seconds) < _SECONDS
        tally.check("" if same else f"{SUMMARY_KEY}: {stage} took {seconds} s, the ledger says {known}")
    query = (
        'SELECT "when", version, attempts, tasks, pass_rate FROM eval_ended JOIN writer USING (w) ORDER BY position, n'
    )
    evals = {row[0]: row[1:] for row in facts.rows(query)}
    for when, measured in summary.eval.items():
        found = (measured.version, measured.attempts, measured.tasks, measured.pass_rate)
        due = evals.pop(when, None)
        tally.check("" if found == due else f"{SUMMARY_KEY}: eval {when} says {found}, the ledger {due}")
    for name in (*stages, *(f"eval {when}" for when in evals)):
        tally.check(f"{SUMMARY_KEY}: does not name {name}, which the ledger says is done" if case.sealed else "")
