"""Policy versions: made by optimizer steps, published as they were made, held as they were published."""

import msgspec

from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.weight_files import collected


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
    _made_twice(case, tally)
    _epochs_grow(case, tally)
    _head(case, tally)


def _made_twice(case: Case, tally: Tally) -> None:
    """Who takes the head over may make a version anew that it does not name; then others follow it or apply it."""
    facts, head = case.facts, case.snapshot.head
    query = "SELECT lineage, version FROM published GROUP BY lineage, version HAVING count(DISTINCT digest) > 1"
    for lineage, version in facts.rows(query):
        followed = """
            SELECT base_digest FROM weights WHERE lineage = ?1 AND base = ?2
            UNION SELECT digest FROM applied WHERE lineage = ?1 AND version = ?2
        """
        named = {digest for (digest,) in facts.rows(followed, lineage, version)}
        if head is not None and (head.lineage, head.version) == (lineage, version):
            named.add(head.digest)
        epochs = "SELECT epoch, digest FROM published WHERE lineage = ? AND version = ? ORDER BY epoch DESC"
        told = list(facts.rows(epochs, lineage, version))
        newest = {digest for epoch, digest in told if epoch == told[0][0]}
        if len(newest) > 1 or not named <= newest:
            tally.violate(f"{lineage} version {version}: published twice, with different weights")
        else:
            tally.note("a version that was made anew by who took over before the head had named it")


def _epochs_grow(case: Case, tally: Tally) -> None:
    """Who took the head over is not followed by who had it before; what was never named does not count."""
    head = case.snapshot.head
    query = """
        SELECT lineage, version, epoch, before FROM (
            SELECT lineage, version, epoch, max(epoch) OVER (
                PARTITION BY lineage ORDER BY version ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before FROM (SELECT lineage, version, max(epoch) AS epoch FROM published GROUP BY lineage, version)
        ) WHERE epoch < before
    """
    for lineage, version, epoch, before in case.facts.rows(query):
        newest = head.version if head is not None and head.lineage == lineage else _newest_of(case, lineage) - 1
        if version <= newest:
            tally.violate(f"{lineage} version {version}: published in epoch {epoch}, after one of epoch {before}")


def _newest_of(case: Case, lineage: str) -> int:
    return case.facts.one("SELECT coalesce(max(version), -1) FROM published WHERE lineage = ?", lineage)


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
    query = "SELECT digest FROM published WHERE lineage = ? AND version = ? ORDER BY digest <> ? LIMIT 1"
    digest = facts.one(query, head.lineage, head.version, head.digest)
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
    return lineage, _newest_of(case, lineage)


def versions_are_intact(case: Case, tally: Tally) -> None:
    """Check manifests, objects and rebuilt weights, as they were seen in the directory, against what was published."""
    facts = case.facts
    query = (
        "SELECT published.lineage, published.version, published.base, weights.problem, "
        "weights.digest = published.digest, rebuilt "
        "FROM (SELECT DISTINCT lineage, version, base, manifest, digest FROM published) AS published "
        "LEFT JOIN weights USING (lineage, version, manifest)"
    )
    for lineage, version, base, problem, same, rebuilt in facts.rows(query):
        place = f"{lineage} version {version}"
        if problem is None:
            explained = collected(facts, case.snapshot.head, lineage, version, base)
            tally.check("" if explained else f"{place}: published, and its manifest is gone")
            if explained:
                tally.note(explained)
        elif problem:
            tally.check(f"{place}: {problem}")
        else:
            tally.check("" if same else f"{place}: its digest is not the one that was published")
            if not rebuilt:
                tally.note("not rebuilt (--quick)")


def replicas_hold_what_was_published(case: Case, tally: Tally) -> None:
    """Check digests of every sampler's weights against the trainer's, and against each other's within a view."""
    facts = case.facts
    query = """
        SELECT writer.name, applied.lineage, applied.version, applied.digest, (
            SELECT CASE WHEN max(published.digest = applied.digest) THEN applied.digest ELSE max(published.digest) END
            FROM published WHERE published.lineage = applied.lineage AND published.version = applied.version
        ) FROM applied JOIN writer USING (w) ORDER BY applied.w, applied.n
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
