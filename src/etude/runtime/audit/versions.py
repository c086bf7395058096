"""Policy versions: made by optimizer steps, published as they were made, held as they were published."""

import msgspec

from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally


def versions_grow_by_one(case: Case, tally: Tally) -> None:
    """Check that each lineage grows by one from where it was opened, and only by steps of the trainer."""
    facts = case.facts
    query = "SELECT DISTINCT lineage, version FROM published ORDER BY lineage, version"
    lineage, last = "", 0
    for name, version in facts.rows(query):
        if name != lineage:
            tally.check(_opened_wrongly(case, name, version))
        else:
            tally.check(_grown_wrongly(case, name, last, version))
        lineage, last = name, version
    query = "SELECT lineage, version FROM published GROUP BY lineage, version HAVING count(DISTINCT digest) > 1"
    for name, version in facts.rows(query):
        tally.violate(f"{name} version {version}: published twice, with different weights")
    _head(case, tally)


def _grown_wrongly(case: Case, lineage: str, last: int, version: int) -> str:
    """Return what is wrong with a version; one before it may have been made and lost before it was published."""
    query = "SELECT count(DISTINCT version) FROM trained WHERE version > ? AND version <= ?"
    made = case.facts.one(query, last, version)
    if made == version - last:
        return ""
    return f"{lineage} version {version}: published after version {last}, and {made} optimizer steps made it"


def _opened_wrongly(case: Case, lineage: str, version: int) -> str:
    """Return what is wrong with a lineage's first published version."""
    facts = case.facts
    opened = facts.one("SELECT version FROM lineage_opened WHERE lineage = ?", lineage)
    if opened is None:
        # The controller records it after the trainer published.
        return f"{lineage}: published without ever having been opened" if case.sealed else ""
    if opened != version:
        return f"{lineage}: opened at version {opened}, begins with {version}"
    parent = facts.one("SELECT parent FROM lineage_opened WHERE lineage = ?", lineage)
    if parent and not facts.one("SELECT count(*) FROM published WHERE lineage = ?", parent):
        return f"{lineage}: stems from {parent}, of which nothing was published"
    return ""


def _head(case: Case, tally: Tally) -> None:
    head = case.snapshot.head
    facts = case.facts
    if head is None:
        if case.sealed and facts.one("SELECT count(*) FROM published"):
            tally.check("weights/head: missing or damaged, though versions were published")
        return
    digest = facts.one("SELECT digest FROM published WHERE lineage = ? AND version = ?", head.lineage, head.version)
    place = f"weights/head: names {head.lineage} version {head.version}"
    if digest != head.digest:
        tally.check(f"{place}, which was {'published with other weights' if digest else 'never published'}")
        return
    newest = _newest(case)
    stale = case.sealed and newest != (head.lineage, head.version)
    tally.check(f"{place}, the newest is {newest[0]} version {newest[1]}" if stale else "")


def _newest(case: Case) -> tuple[str, int]:
    """Return the last lineage that was opened, and its newest published version."""
    query = "SELECT lineage FROM lineage_opened JOIN writer USING (w) ORDER BY position DESC, n DESC LIMIT 1"
    lineage = case.facts.one(query) or ""
    return lineage, case.facts.one("SELECT coalesce(max(version), -1) FROM published WHERE lineage = ?", lineage)


def versions_are_intact(case: Case, tally: Tally) -> None:
    """Check manifests, objects and rebuilt weights, as they were seen in the directory, against what was published."""
    facts = case.facts
    query = (
        "SELECT published.lineage, published.version, weights.problem, weights.digest = published.digest, rebuilt "
        "FROM (SELECT DISTINCT lineage, version, manifest, digest FROM published) AS published "
        "LEFT JOIN weights USING (lineage, version, manifest)"
    )
    for lineage, version, problem, same, rebuilt in facts.rows(query):
        place = f"{lineage} version {version}"
        if problem is None:
            if _was_cut_short(case, lineage, version):
                tally.note("a version whose publication was cut short by a crash")
                tally.check()
            else:
                tally.check(f"{place}: published, and its manifest is gone")
        elif problem:
            tally.check(f"{place}: {problem}")
        else:
            tally.check("" if same else f"{place}: its digest is not the one that was published")
            if not rebuilt:
                tally.note("not rebuilt (--quick)")


def _was_cut_short(case: Case, lineage: str, version: int) -> bool:
    """Whether whoever published this version last may have died before its manifest was written."""
    query = (
        "SELECT max(closed), (SELECT max(version) FROM published WHERE lineage = ?1) FROM published "
        "JOIN writer USING (w) WHERE lineage = ?1 AND version = ?2"
    )
    closed, newest = next(case.facts.rows(query, lineage, version))
    return not closed and newest == version


def replicas_hold_what_was_published(case: Case, tally: Tally) -> None:
    """Check digests of every sampler's weights against the trainer's, and against each other's within a view."""
    facts = case.facts
    query = """
        SELECT writer.name, applied.lineage, applied.version, applied.digest, published.digest FROM applied
        JOIN writer USING (w) LEFT JOIN (SELECT DISTINCT lineage, version, digest FROM published) AS published
        USING (lineage, version) ORDER BY applied.w, applied.n
    """
    for name, lineage, version, held, published in facts.rows(query):
        place = f"{name}: applied {lineage} version {version}"
        if published is None and (case.behind or case.is_late("published", f"{lineage}/{version}/{held}")):
            tally.check()
        elif published is None:
            tally.check(f"{place}, which was never published")
        else:
            tally.check("" if held == published else f"{place}, with other weights than were published")
    query = (
        "SELECT view, lineage, version, group_concat(DISTINCT held) FROM applied WHERE held <> '' "
        "GROUP BY view, lineage, version HAVING count(DISTINCT held) > 1"
    )
    for view, lineage, version, _ in facts.rows(query):
        tally.violate(f"view {view}: replicas hold different bytes of {lineage} version {version}")
    query = """
        SELECT name, lineage, version, before FROM (
            SELECT w, lineage, version, max(version) OVER (
                PARTITION BY w, lineage ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before FROM applied
        ) JOIN writer USING (w) WHERE before >= version
    """
    for name, lineage, version, before in facts.rows(query):
        tally.violate(f"{name}: went from version {before} back to {version} of {lineage}")


class _Held:
    """The versions that a sampler had applied by a place in its ledger."""

    def __init__(self, case: Case, w: int) -> None:
        self._coming = case.facts.rows("SELECT n, lineage, version FROM applied WHERE w = ? ORDER BY n", w)
        self._next = next(self._coming, None)
        self._held: set[tuple[str, int]] = set()

    def by(self, n: int) -> set[tuple[str, int]]:
        """Return them; later places come later."""
        while self._next is not None and self._next[0] < n:
            self._held.add((self._next[1], self._next[2]))
            self._next = next(self._coming, None)
        return self._held


def samplers_draw_what_they_hold(case: Case, tally: Tally) -> None:
    """Check that each token was drawn with weights that its sampler had applied by then, and none with a mix."""
    decode = msgspec.json.Decoder(list[tuple[int, int]]).decode
    query = "SELECT w, n, request, tokens, versions, lineage FROM drawn ORDER BY rowid"
    reading, sampler = -1, _Held(case, -1)
    for w, n, request, tokens, versions, lineage in case.facts.rows(query):
        if w != reading:
            reading, sampler = w, _Held(case, w)
        held, runs = sampler.by(n), decode(versions)
        unknown = [version for version, _ in runs if (lineage, version) not in held]
        if sum(count for _, count in runs) != tokens:
            tally.check(f"{request}: {tokens} tokens, but versions of {sum(count for _, count in runs)}")
        elif unknown:
            tally.check(f"{request}: drawn with version {unknown[0]} of {lineage}, which its sampler did not hold")
        else:
            tally.check()
