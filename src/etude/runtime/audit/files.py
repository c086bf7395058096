"""Every file of the run: claimed by a fact and as it was then, or of a kind that nobody claims."""

import hashlib
import re
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from etude.errors import ObjectMissingError
from etude.interfaces import ObjectStore
from etude.runtime.audit.case import Case
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.group_files import note_group, note_rollout
from etude.runtime.audit.weight_files import collected
from etude.runtime.checkpoints import POINTER_KEY
from etude.runtime.directory import METRICS_KEY, SUMMARY_KEY
from etude.weight_types import Head
from etude.weights.chain import HEAD_KEY

NOT_COVERED = ("logs/", "services/", "probes/", "samplers/", "sandboxes/", "weights/readers/", "views/")
"""Written for people and for the moment, or made of what is covered: `etude verify` does not read them. What samplers
hold of a view is compared all the same, and `etude weights verify --view` reads the chain of one."""

_POINTERS = (HEAD_KEY, POINTER_KEY, SUMMARY_KEY)
"""Replaced as the run goes on; other invariants compare what they say."""

_LEDGER = re.compile(r"ledger/((run|seal)\.json|[^/]+/\d{6}\.jsonl\.zst)")
_OBJECT = re.compile(r"weights/[^/]+/objects/([0-9a-f]{64})")
_CRASH_LEAVES = re.compile(r"checkpoints/\d+/[^/]+|weights/[^/]+/manifests/\d+-[0-9a-f]{16}\.json\.zst")
"""Written before the fact that claims them."""
_GARBAGE_KEY = "weights/garbage.json"
"""What `etude weights gc` is about to delete; there since its first collection."""
_BEFORE_SEAL = re.compile(r"run\.toml|metrics\.jsonl|report\.html|(config|evals|policy|tasks)/.+")
"""Claimed by a stage's end or by the seal."""

_SCHEMA = """
CREATE TABLE file(key TEXT PRIMARY KEY, size INTEGER, digest TEXT);
CREATE TABLE claim(key TEXT, digest TEXT, size INTEGER, w INTEGER, n INTEGER, kind TEXT);
INSERT INTO claim SELECT key, digest, NULL, w, n, 'group' FROM group_ready;
INSERT INTO claim
SELECT 'rollouts/' || substr(prefix, 1, length(prefix) - 1) || '/' || substr(rollout, length(prefix) + 1) || '.json',
    digest, NULL, w, n, 'rollout'
FROM (SELECT *, rtrim(rollout, '0123456789r') AS prefix FROM rollout_ended) WHERE digest <> '';
INSERT INTO claim SELECT entry.key, entry.value, NULL, w, n, 'checkpoint'
FROM checkpoint_written, json_each(checkpoint_written.files) AS entry;
INSERT INTO claim SELECT entry.key, entry.value, NULL, w, n, 'stage'
FROM stage_ended, json_each(stage_ended.files) AS entry;
INSERT INTO claim
SELECT 'weights/' || lineage || '/manifests/' || version || '-' || substr(manifest, 1, 16) || '.json.zst',
    manifest, NULL, w, n, 'manifest'
FROM published;
INSERT INTO claim SELECT 'weights/' || lineage || '/objects/' || routes, routes, NULL, w, n, 'page'
FROM published WHERE routes <> '';
"""
_SEAL = """
INSERT INTO claim SELECT entry.key, json_extract(entry.value, '$[1]'), json_extract(entry.value, '$[0]'), w, n, 'seal'
FROM sealed, json_each(sealed.files) AS entry WHERE sealed.w = ?
"""
_INDEX = """
CREATE TABLE last_claim AS
SELECT key, digest, size, w, n, kind, position, max((position + 1) * 1099511627776 + n) AS place
FROM claim JOIN writer USING (w) GROUP BY key;
CREATE UNIQUE INDEX last_claim_of ON last_claim(key);
CREATE INDEX claim_of ON claim(key);
BEGIN;
"""

_DURABLE = ("checkpoint_written", "stage_ended", "eval_ended", "sealed")
"""Facts that are recorded once every file claimed before them is stored."""


def collect_claims(case: Case) -> None:
    """Make the tables, and find out what the facts claim of files."""
    sql = case.facts.sql
    sql.executescript(_SCHEMA + "BEGIN;")
    if case.sealed:
        sql.execute(_SEAL, (case.last_controller,))
    sql.executescript(_INDEX)


async def look_at_files(store: ObjectStore, facts: Facts, keys: list[str]) -> None:
    """Read every file once: those that were listed before the ledger was read, and those that a fact claims."""
    for key in keys:
        if not key.startswith(NOT_COVERED) and not _LEDGER.fullmatch(key):
            await _look(store, facts, key)
    # A store may list late what it has.
    for (key,) in list(facts.rows("SELECT key FROM last_claim WHERE key NOT IN (SELECT key FROM file)")):
        await _look(store, facts, key)


async def _look(store: ObjectStore, facts: Facts, key: str) -> None:
    try:
        data = await store.get(key)
    except ObjectMissingError:
        return
    size = facts.one("SELECT size FROM last_claim WHERE key = ?", key) if key == METRICS_KEY else None
    digest = hashlib.sha256(data[:size] if size else data).hexdigest()
    facts.sql.execute("INSERT INTO file VALUES(?, ?, ?)", (key, len(data), digest))
    if key.startswith("groups/"):
        note_group(facts, key, data, digest)
    elif key.startswith("rollouts/"):
        note_rollout(facts, key, data, digest)


def files_are_those_claimed(case: Case, tally: Tally) -> None:
    """Check every claimed file, and look for files that nobody claims."""
    facts = case.facts
    tally.checked(
        facts.one("SELECT count(*) FROM file JOIN last_claim USING (key) WHERE file.digest = last_claim.digest")
    )
    query = """
        SELECT key, file.digest, claim.digest, claim.w, claim.n, claim.kind
        FROM last_claim AS claim LEFT JOIN file USING (key) WHERE file.digest IS NOT claim.digest ORDER BY key
    """
    for key, found, claimed, w, n, kind in facts.rows(query):
        if key == HEAD_KEY and _only_its_floor_rose(case.snapshot.head, claimed):
            tally.check()
            tally.note("a head whose floor rose since, for a collection of garbage")
            continue
        earlier = found and facts.one("SELECT count(*) FROM claim WHERE key = ? AND digest = ?", key, found)
        explained = _EXPLANATIONS[kind](case, key, w, n)
        if explained and (found is None or earlier):
            tally.check()
            tally.note(explained)
        else:
            tally.check(f"{key}: {'gone' if found is None else 'its bytes are not those that were recorded'}")
    query = "SELECT key, digest FROM file WHERE key NOT IN (SELECT key FROM last_claim) ORDER BY key"
    for key, digest in facts.rows(query):
        _unclaimed(case, tally, key, digest)


def _only_its_floor_rose(head: Head | None, claimed: str) -> bool:
    """Whether the head had this sha256 before its floor rose to where it is."""
    if head is None:
        return False
    before = (msgspec.json.encode(replace(head, floor=floor)) for floor in range(head.floor))
    return any(hashlib.sha256(data).hexdigest() == claimed for data in before)


def _unclaimed(case: Case, tally: Tally, key: str, digest: str) -> None:
    if key in _POINTERS or key == _GARBAGE_KEY:
        tally.check()
    elif match := _OBJECT.fullmatch(key):
        if match[1] != digest:
            tally.check(f"{key}: its bytes are not those of its name")
        elif case.facts.one("SELECT count(*) FROM referred WHERE key = ?", key):
            tally.check()
        else:
            _left_over(case, tally, key)
    elif _CRASH_LEAVES.fullmatch(key):
        _left_over(case, tally, key)
    elif _BEFORE_SEAL.fullmatch(key) and not case.sealed:
        tally.check()
        tally.note("a file that the seal will claim")
    else:
        tally.check(f"{key}: no fact speaks of it")


def _left_over(case: Case, tally: Tally, key: str) -> None:
    tally.check("" if case.crashed else f"{key}: no fact speaks of it")
    if case.crashed:
        tally.note("a file whose fact was never recorded: its writer was killed in between")


def _unwritten(case: Case, w: int, n: int) -> bool:
    """Whether a crash explains that what this fact speaks of was not written any more.

    Rollouts and groups are stored in the order of their facts, so one that was claimed later and is there disproves it.
    """
    facts = case.facts
    if facts.one("SELECT closed FROM writer WHERE w = ?", w):
        return False
    if any(facts.one(f"SELECT count(*) FROM {kind} WHERE w = ? AND n > ?", w, n) for kind in _DURABLE):
        return False
    query = (
        "SELECT count(*) FROM claim JOIN file USING (key, digest) "
        "WHERE w = ? AND n > ? AND kind IN ('group', 'rollout')"
    )
    return not facts.one(query, w, n)


def _group_missing(case: Case, key: str, w: int, n: int) -> str:
    ticket = case.facts.one("SELECT ticket FROM group_ready WHERE key = ?", key)
    fate = case.facts.one("SELECT fate FROM fate WHERE ticket = ?", ticket)
    reason = case.facts.one("SELECT reason FROM fate WHERE ticket = ?", ticket)
    if fate == "lost" or (fate == "open" and reason == "in flight"):
        return "a group's file that was lost in a crash: the group was given up or is played again"
    waits = fate == "open" and w == case.last_controller and _unwritten(case, w, n)
    return "a group's file that is not written yet" if waits else ""


def _rollout_missing(case: Case, key: str, w: int, n: int) -> str:
    del key
    return "a rollout's file that is not written yet, or was not when a crash came" if _unwritten(case, w, n) else ""


def _checkpoint_missing(case: Case, key: str, w: int, n: int) -> str:
    query = (
        "SELECT count(*) FROM checkpoint_deleted AS gone JOIN writer USING (w) WHERE step = ? "
        "AND (position, n) > ((SELECT position FROM writer WHERE w = ?), ?)"
    )
    step = key.removeprefix("checkpoints/").partition("/")[0]
    deleted = step.isdecimal() and case.facts.one(query, int(step), w, n)
    return "a file of a checkpoint that was deleted" if deleted else ""


def _manifest_missing(case: Case, key: str, w: int, n: int) -> str:
    """Manifests and pages are written before the fact, so only a collection of what nobody needs explains it."""
    del key
    query = "SELECT lineage, version, base FROM published WHERE w = ? AND n = ?"
    lineage, version, base = next(case.facts.rows(query, w, n))
    return collected(case.facts, case.snapshot.head, lineage, version, base)


def _page_missing(case: Case, key: str, w: int, n: int) -> str:
    """A page is replaced with each version until it is full; a collection removes what leads nowhere any more."""
    facts, head = case.facts, case.snapshot.head
    reached = facts.one("SELECT count(*) FROM paged WHERE key = ?", key)
    collected_once = facts.one("SELECT count(*) FROM file WHERE key = ?", _GARBAGE_KEY)
    opened = facts.one("SELECT min(version) FROM published WHERE lineage = ?", head.lineage) if head else None
    # An older etude removed its list in the end, and left a floor that rose.
    if head is not None and not reached and (collected_once or (opened is not None and head.floor > opened)):
        return "a page of routes that a newer one replaced, collected as garbage"
    return _manifest_missing(case, key, w, n)


def _never(case: Case, key: str, w: int, n: int) -> str:
    del case, key, w, n
    return ""


_EXPLANATIONS: dict[str, Callable[[Case, str, int, int], str]] = {
    "group": _group_missing,
    "rollout": _rollout_missing,
    "checkpoint": _checkpoint_missing,
    "manifest": _manifest_missing,
    "page": _page_missing,
    "stage": _never,
    "seal": _never,
}
