"""Drawn tokens: each is trained, masked, dropped, or belongs to something that ended without; none is another's."""

from collections.abc import Iterator
from typing import Any

import msgspec

from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.groups import group_id
from etude.telemetry.events import TrainedGroup
from etude.types import WITH_REWARD

_BEHIND = "tokens that a sampler drew, and whose ledger has not come into the bucket yet"
_SCORED = ", ".join(f"'{outcome.value}'" for outcome in WITH_REWARD)

_TABLES = f"""
CREATE TABLE session AS
SELECT session, rollout, purpose, outcome, ended.drawn AS in_tree,
    CASE WHEN purpose = 'train' THEN CAST(substr(rollout, 2) AS INTEGER) END AS ticket
FROM rollout_started AS started LEFT JOIN (
    SELECT session, outcome, drawn FROM rollout_ended GROUP BY session
) AS ended USING (session) GROUP BY session;
CREATE UNIQUE INDEX session_of ON session(session);
CREATE TABLE sampled AS
SELECT substr(prefix, 1, length(prefix) - 1) AS session, calls, tokens FROM (
    SELECT rtrim(request, '0123456789') AS prefix, count(DISTINCT request) AS calls, sum(tokens) AS tokens
    FROM drawn GROUP BY prefix
);
CREATE UNIQUE INDEX sampled_of ON sampled(session);
CREATE TABLE token_fate AS
SELECT sampled.session, sampled.tokens, min(sampled.tokens, coalesce(session.in_tree, 0)) AS in_tree, session.ticket,
    CASE
        WHEN session.session IS NULL THEN 'unknown'
        WHEN session.outcome IS NULL THEN 'unfinished'
        WHEN session.purpose <> 'train' THEN session.purpose
        WHEN member.session IS NOT NULL THEN 'group'
        WHEN session.outcome NOT IN ({_SCORED}) THEN 'unscored: ' || session.outcome
        WHEN fate.fate = 'lost' THEN 'lost: ' || fate.reason
        WHEN fate.fate = 'open' THEN 'waiting'
        ELSE 'left out'
    END AS fate
FROM sampled LEFT JOIN session USING (session)
LEFT JOIN fate ON fate.ticket = session.ticket
LEFT JOIN member ON member.session = sampled.session AND member.ticket = session.ticket;
"""
"""`session`: rollouts, with the tokens in their trees. `sampled`: what samplers drew, by session. `token_fate`: both,
and what became of the tokens in the tree; the others were drawn for calls that nobody waited for any more."""


def account_for_tokens(case: Case) -> None:
    """Make the tables that the checks of this file share."""
    case.facts.sql.executescript(_TABLES)


def tokens_conserved(case: Case, tally: Tally) -> None:
    """Check the accounts of sessions, of groups, and of the trainer's steps against each other."""
    facts = case.facts
    for (session,) in facts.rows("SELECT session FROM token_fate WHERE fate = 'unknown'"):
        if case.behind or case.is_late("session", session):
            tally.note("a rollout that began while the ledgers were read")
        else:
            tally.violate(f"{session}: tokens were drawn for it, and no rollout of that session ever began")
    tally.checked(facts.one("SELECT count(*) FROM token_fate"))
    query = (
        "SELECT session.session, session.in_tree, coalesce(sampled.tokens, 0) FROM session "
        "LEFT JOIN sampled USING (session) WHERE session.in_tree > coalesce(sampled.tokens, 0)"
    )
    for session, in_tree, tokens in facts.rows(query):
        if case.behind:
            tally.note(_BEHIND)
            continue
        tally.violate(f"{session}: {in_tree} tokens in its tree, samplers drew {tokens} for it")
    restarted = "SELECT value FROM resumed, json_each(resumed.restarted)"
    left_out = f"SELECT session FROM token_fate WHERE fate = 'left out' AND ticket NOT IN ({restarted})"
    for (session,) in facts.rows(left_out):
        tally.violate(f"{session}: scored, and left out of its group")
    for problem in map(_problem_of_group, _groups(case)):
        tally.check(problem)
    for version, groups in facts.rows("SELECT version, groups FROM trained"):
        for group in msgspec.json.decode(groups, type=list[TrainedGroup]):
            tally.check(_problem_of_trained(case, version, group))


def _groups(case: Case) -> Iterator[tuple[Any, ...]]:
    query = (
        "SELECT ready.ticket, ready.drawn, file.drawn, "
        "(SELECT sum(session.in_tree) FROM member JOIN session USING (session) WHERE member.ticket = ready.ticket) "
        "FROM ready JOIN group_file AS file ON file.ticket = ready.ticket AND file.problem = ''"
    )
    return case.facts.rows(query)


def _problem_of_group(row: tuple[int, int, int, int | None]) -> str:
    ticket, said, in_file, in_sessions = row
    if said != in_file:
        return f"{group_id(ticket)}: {said} drawn tokens are recorded, {in_file} are in its file"
    if in_sessions != in_file:
        return f"{group_id(ticket)}: {in_file} drawn tokens in its file, {in_sessions or 0} in its rollouts"
    return ""


def _problem_of_trained(case: Case, version: int, group: TrainedGroup) -> str:
    place = f"{group.group} in version {version}"
    accounted = group.trained + sum(group.masked.values()) + sum(group.dropped.values())
    if accounted != group.drawn:
        return f"{place}: {group.drawn} tokens drawn, {accounted} trained, masked or dropped"
    ticket = group.group.removeprefix("g")
    said = case.facts.one("SELECT drawn FROM ready WHERE ticket = ?", int(ticket) if ticket.isdecimal() else -1)
    if said != group.drawn:
        return f"{place}: the trainer counts {group.drawn} drawn tokens, the controller {said}"
    return ""


def tokens_are_those_drawn(case: Case, tally: Tally) -> None:
    """Check every model call in a trained or waiting group against what a sampler says that it drew."""
    facts = case.facts
    facts.sql.execute("CREATE INDEX drawn_as ON drawn(digest, prompt_digest)")
    query = """
        SELECT node.session, node.ticket, node.tokens, count(*) AS nodes, (
            SELECT count(*) FROM drawn
            WHERE drawn.digest = node.digest AND drawn.prompt_digest = node.prompt_digest
            AND drawn.tokens = node.tokens AND drawn.lineage = node.lineage
            AND rtrim(drawn.request, '0123456789') = node.session || '/'
        ) AS draws
        FROM node GROUP BY node.session, node.digest, node.prompt_digest, node.lineage
    """
    for session, ticket, tokens, nodes, draws in facts.rows(query):
        tally.checked(nodes)
        if draws < nodes and case.behind:
            tally.note(_BEHIND)
        elif draws < nodes:
            place = f"{group_id(ticket)}: a call of {tokens} tokens in session {session or '(none)'}"
            tally.violate(f"{place} is not what a sampler drew")
    query = """
        SELECT member.session, member.ticket, sampled.calls - member.calls, member.abandoned FROM member
        JOIN sampled USING (session) WHERE sampled.calls > member.calls + member.abandoned
    """
    for session, ticket, missing, abandoned in facts.rows(query):
        tally.violate(
            f"{group_id(ticket)}: {missing} drawn calls of {session} are not in its tree, {abandoned} were given up"
        )


def token_totals(case: Case) -> dict[str, int]:
    """Return what became of all drawn tokens, by reason."""
    facts = case.facts
    totals = {"drawn": facts.one("SELECT coalesce(sum(tokens), 0) FROM drawn")}
    rows = facts.rows("SELECT fate, sum(in_tree) FROM token_fate WHERE fate <> 'group' GROUP BY fate ORDER BY fate")
    totals |= {_named(fate): tokens for fate, tokens in rows if tokens}
    spare = facts.one(
        "SELECT coalesce(sum(tokens - in_tree), 0) FROM token_fate WHERE fate NOT IN ('unknown', 'unfinished')"
    )
    unfinished = facts.one("SELECT coalesce(sum(tokens), 0) FROM token_fate WHERE fate = 'unfinished'")
    totals |= {name: tokens for name, tokens in (("abandoned", spare), ("unfinished", unfinished)) if tokens}
    for name, tokens in _of_groups(case).items():
        totals[name] = totals.get(name, 0) + tokens
    return totals


def _named(fate: str) -> str:
    return {"eval": "evaluation", "left out": "restarted"}.get(fate, fate)


def _of_groups(case: Case) -> dict[str, int]:
    """Return what became of tokens in groups: for trained ones, what the trainer says."""
    totals: dict[str, int] = {}
    query = (
        "SELECT fate.fate, fate.reason, fate.version, sum(token_fate.in_tree), fate.ticket FROM token_fate "
        "JOIN fate USING (ticket) WHERE token_fate.fate = 'group' GROUP BY fate.ticket"
    )
    for fate, reason, version, tokens, ticket in case.facts.rows(query):
        account = _account(case, version, ticket) if fate == "trained" else None
        if account is None:
            name = f"lost: {reason}" if fate == "lost" else "waiting"
            totals[name] = totals.get(name, 0) + tokens
            continue
        parts = {"trained": account.trained}
        parts |= {f"masked: {why}": count for why, count in account.masked.items()}
        parts |= {f"dropped: {why}": count for why, count in account.dropped.items()}
        for name, count in parts.items():
            totals[name] = totals.get(name, 0) + count
    return totals


def _account(case: Case, version: int, ticket: int) -> TrainedGroup | None:
    for (groups,) in case.facts.rows("SELECT groups FROM trained WHERE version = ? ORDER BY rowid DESC", version):
        for group in msgspec.json.decode(groups, type=list[TrainedGroup]):
            if group.group == group_id(ticket):
                return group
    return None
