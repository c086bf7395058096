"""The audit of a run: read everything once, in bounded memory, then ask what must hold.

    files listed ─► ledgers ─► every file, group by group ─► weights, version by version ─► invariants
                       └───────────────┴──── temporary database ────┴──────────────────────────┘

The order makes it right for a run that goes on: a fact is written before what it speaks of, so whatever was listed has
its fact in a ledger that is read afterwards.
"""

import json
import tempfile
import tomllib
from pathlib import Path
from time import perf_counter

from pydantic import ValidationError

from etude.config import RunConfig
from etude.errors import IntegrityError, ObjectMissingError, TaskError
from etude.interfaces import ObjectStore
from etude.runtime.audit.case import Case, Invariant, Snapshot
from etude.runtime.audit.chain import controllers_form_a_chain, ledger_intact, order_controllers, writers_known
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.files import collect_claims, files_are_those_claimed, look_at_files
from etude.runtime.audit.findings import Finding, Report, Tally
from etude.runtime.audit.group_files import (
    groups_are_what_was_recorded,
    index,
    prepare,
    rollouts_say_what_happened,
)
from etude.runtime.audit.groups import groups_once, placeholder_tasks, tasks_in_order, tasks_once
from etude.runtime.audit.intake import load_late, load_ledger
from etude.runtime.audit.rules import advantages_follow_from_rewards, staleness_bounded
from etude.runtime.audit.sandboxes import sandboxes_accounted
from etude.runtime.audit.summary import summary_follows_from_facts
from etude.runtime.audit.tickets import TicketFold
from etude.runtime.audit.tokens import account_for_tokens, token_totals, tokens_are_those_drawn, tokens_conserved
from etude.runtime.audit.trees import trees_are_sound
from etude.runtime.audit.versions import (
    replicas_hold_what_was_published,
    samplers_draw_what_they_hold,
    versions_are_intact,
    versions_grow_by_one,
)
from etude.runtime.audit.weight_files import look_at_weights
from etude.runtime.checkpoints import POINTER_KEY
from etude.runtime.directory import CONFIG_KEY, SUMMARY_KEY
from etude.store.local import FileStore
from etude.tasks.harbor import task_directories
from etude.tasks.source import SeededTaskSource
from etude.weights.reader import read_head

INVARIANTS = (
    Invariant(
        name="ledger_intact",
        meaning="no ledger has a gap, an edit or a lost end that another one knows of",
        check=ledger_intact,
    ),
    Invariant(
        name="controllers_form_a_chain",
        meaning="each controller goes on from the one before it",
        check=controllers_form_a_chain,
    ),
    Invariant(name="writers_known", meaning="no ledger is missing, none is a stranger's", check=writers_known),
    Invariant(
        name="tasks_in_order", meaning="tasks were admitted as the seeded source gives them", check=tasks_in_order
    ),
    Invariant(
        name="tasks_once", meaning="each admitted task was trained once, or lost with a reason", check=tasks_once
    ),
    Invariant(
        name="groups_once",
        meaning="each optimizer step trained on the groups that were recorded for it, none twice",
        check=groups_once,
    ),
    Invariant(
        name="groups_are_what_was_recorded",
        meaning="group files hold the rollouts that were played for their tickets",
        check=groups_are_what_was_recorded,
    ),
    Invariant(
        name="rollouts_say_what_happened",
        meaning="rollout documents show outcome and reward as they were recorded",
        check=rollouts_say_what_happened,
    ),
    Invariant(
        name="tokens_conserved",
        meaning="drawn tokens are trained, masked, dropped or accounted for",
        check=tokens_conserved,
    ),
    Invariant(
        name="tokens_are_those_drawn",
        meaning="every call in a group is, bit for bit, what a sampler saw and drew",
        check=tokens_are_those_drawn,
    ),
    Invariant(
        name="trees_are_sound",
        meaning="each call hangs where its edge says, and none is trained that is no part of the task",
        check=trees_are_sound,
    ),
    Invariant(
        name="staleness_bounded", meaning="no group was trained on that was older than allowed", check=staleness_bounded
    ),
    Invariant(
        name="advantages_follow_from_rewards",
        meaning="advantages come from scored rollouts, and add up to 0 in a full group",
        check=advantages_follow_from_rewards,
    ),
    Invariant(
        name="versions_grow_by_one",
        meaning="optimizer steps alone make versions, one after the other; lineages fork where recorded",
        check=versions_grow_by_one,
    ),
    Invariant(
        name="versions_are_intact",
        meaning="every published version can be rebuilt to the digest it was published with",
        check=versions_are_intact,
    ),
    Invariant(
        name="replicas_hold_what_was_published",
        meaning="every sampler's weights are those of the version it claims, and never go back",
        check=replicas_hold_what_was_published,
    ),
    Invariant(
        name="samplers_draw_what_they_hold",
        meaning="every token was drawn with a version that its sampler held",
        check=samplers_draw_what_they_hold,
    ),
    Invariant(
        name="sandboxes_accounted", meaning="sandboxes created are destroyed, or alive", check=sandboxes_accounted
    ),
    Invariant(
        name="files_are_those_claimed",
        meaning="every file is as it was recorded, none is missing, none is a stranger's",
        check=files_are_those_claimed,
    ),
    Invariant(
        name="summary_follows_from_facts",
        meaning="summary.json says what the ledger says",
        check=summary_follows_from_facts,
    ),
)
"""In the order in which they are reported."""


async def audit(store: ObjectStore, *, run: str, quick: bool = False, seal: str = "") -> Report:
    """Check everything that can be checked of a run, and write nothing into it.

    Args:
        store: The run directory.
        run: What the report calls it.
        quick: Leave out rebuilding the policy versions.
        seal: Chain value that the run was sealed with, as an earlier report says; empty: unknown.

    Raises:
        StoreError: There is no run with a ledger, or the store cannot be read.
        ConfigError: A newer etude wrote the ledger.
    """
    started = perf_counter()
    with tempfile.TemporaryDirectory(prefix="etude-verify-") as directory:
        facts = Facts(Path(directory) / "facts.sqlite")
        try:
            case, keys = await _read(store, facts, quick=quick)
            findings = judge(case)
            findings = (_seal_finding(case, seal), *findings) if seal else findings
            return Report(
                run=run,
                state="sealed" if case.sealed else "open",
                seal=_seal(case),
                findings=findings,
                totals=_totals(case),
                ledger_facts=facts.one("SELECT coalesce(sum(events), 0) FROM writer"),
                files=len(keys),
                seconds=round(perf_counter() - started, 3),
            )
        finally:
            facts.close()


def judge(case: Case) -> tuple[Finding, ...]:
    """Return a finding per invariant."""
    findings: list[Finding] = []
    for invariant in INVARIANTS:
        tally = Tally(invariant.name, invariant.meaning)
        invariant.check(case, tally)
        findings.append(tally.finding())
    return tuple(findings)


async def _read(store: ObjectStore, facts: Facts, *, quick: bool) -> tuple[Case, list[str]]:
    keys = await store.list("")
    snapshot = await take_snapshot(store)
    await load_ledger(store, facts)
    return await examine(store, facts, snapshot, keys, quick=quick), keys


async def examine(store: ObjectStore, facts: Facts, snapshot: Snapshot, keys: list[str], *, quick: bool) -> Case:
    """Look at all that the facts speak of, and at these files; return what can be judged then."""
    order_controllers(facts)
    await load_late(store, facts)
    fold = TicketFold(facts)
    fold.run()
    lags = not isinstance(store, FileStore)
    case = Case(facts, snapshot, tasks=_task_source(snapshot.config, keys), lags=lags)
    case.under_way = fold.under_way
    prepare(facts)
    collect_claims(case)
    await look_at_files(store, facts, keys)
    index(facts)
    await look_at_weights(store, facts, rebuild=not quick)
    account_for_tokens(case)
    return case


async def take_snapshot(store: ObjectStore) -> Snapshot:
    """Read what is replaced as the run goes on."""
    config = await _optional(store, CONFIG_KEY)
    try:
        head = await read_head(store)
    except IntegrityError:
        head = None
    return Snapshot(
        config=None if config is None else _config(config),
        head=head,
        summary=await _optional(store, SUMMARY_KEY),
        pointer=await _optional(store, POINTER_KEY),
    )


async def _optional(store: ObjectStore, key: str) -> bytes | None:
    try:
        return await store.get(key, max_bytes=16 << 20)
    except ObjectMissingError:
        return None


def _config(data: bytes) -> RunConfig | None:
    try:
        return RunConfig.model_validate_json(json.dumps(tomllib.loads(data.decode())))
    except (ValidationError, ValueError):
        return None


def _task_source(config: RunConfig | None, keys: list[str]) -> SeededTaskSource | None:
    """Return the run's source of training tasks, of which only names matter here."""
    if config is None:
        return None
    if config.tasks.family:
        parts = [key.split("/") for key in keys if key.startswith("tasks/train/")]
        names = {part[2] for part in parts}
    else:
        try:
            names = {path.name for path in task_directories(Path(config.tasks.train))}
        except TaskError:
            return None
    return SeededTaskSource(placeholder_tasks(sorted(names)), seed=config.run.seed) if names else None


def _seal(case: Case) -> str:
    query = "SELECT chain FROM mark WHERE w = ? ORDER BY events DESC LIMIT 1"
    return (case.facts.one(query, case.last_controller) or "") if case.sealed else ""


def _seal_finding(case: Case, seal: str) -> Finding:
    tally = Tally("seal", "the run is sealed as it was when the seal was noted")
    found = _seal(case)
    tally.check("" if found == seal else f"the seal is {found or 'missing'}, not {seal}")
    return tally.finding()


def _totals(case: Case) -> dict[str, dict[str, int]]:
    query = (
        "SELECT CASE fate WHEN 'lost' THEN 'lost: ' || reason ELSE fate END AS name, count(*) FROM fate GROUP BY name"
    )
    tasks = {"admitted": case.facts.one("SELECT count(*) FROM admitted"), **dict(case.facts.rows(query))}
    query = "SELECT coalesce(outcome, 'unfinished') AS name, count(*) FROM session GROUP BY name"
    return {"tasks": tasks, "rollouts": dict(case.facts.rows(query)), "tokens": token_totals(case)}
