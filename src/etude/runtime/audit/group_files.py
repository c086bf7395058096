"""Group files and rollout documents as rows: what the invariants need of them, one file in memory at a time."""

import struct
from collections.abc import Sequence

import msgspec

from etude.algorithm.staleness import oldest_version
from etude.algorithm.trees import tree_problem
from etude.errors import IntegrityError
from etude.rollout.atif import Document
from etude.runtime.audit.case import Case
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.groups import group_id
from etude.runtime.audit.trees import TABLES, note_trees
from etude.store.groups import decode_advantages, decode_group
from etude.telemetry.digests import of_drawn, of_ids
from etude.types import Group, Node, Trajectory

_SCHEMA = """
CREATE TABLE group_file(
    key TEXT, ticket INTEGER, task TEXT, admitted_version INTEGER, drawn INTEGER, oldest INTEGER, newest INTEGER,
    rewards TEXT, advantages TEXT, problem TEXT
);
CREATE TABLE member(
    ticket INTEGER, session TEXT, rollout TEXT, outcome TEXT, reward REAL, drawn INTEGER, calls INTEGER,
    abandoned INTEGER
);
CREATE TABLE node(ticket INTEGER, session TEXT, prompt_digest TEXT, digest TEXT, tokens INTEGER, lineage TEXT);
CREATE TABLE rollout_file(
    key TEXT, digest TEXT, rollout TEXT, task TEXT, purpose TEXT, outcome TEXT, reward REAL, drawn INTEGER, problem TEXT
);
CREATE TABLE ready AS
SELECT ticket, key, digest, rollouts, drawn, max(position * 1099511627776 + n) AS place
FROM group_ready JOIN writer USING (w) GROUP BY ticket;
CREATE UNIQUE INDEX ready_of ON ready(ticket);
"""
"""`member`: rollouts in a group, with the calls that the gateway gave up. `ready`: the last word on each group."""


def prepare(facts: Facts) -> None:
    """Make the tables."""
    facts.sql.executescript(f"{_SCHEMA}{TABLES}BEGIN;")


def index(facts: Facts) -> None:
    """Make what was noted quick to find."""
    facts.sql.executescript(
        "CREATE INDEX group_file_of ON group_file(ticket); CREATE INDEX member_of ON member(session);"
        "CREATE INDEX member_in ON member(ticket); CREATE INDEX tree_of ON tree(ticket); BEGIN;"
    )


def note_group(facts: Facts, key: str, data: bytes, digest: str) -> None:
    """Take what a group's file says, if it is the file that was recorded last."""
    row = next(facts.rows("SELECT ticket, rollouts FROM ready WHERE key = ? AND digest = ?", key, digest), None)
    if row is None:
        return
    ticket, sessions = row[0], msgspec.json.decode(row[1], type=list[str])
    try:
        group, advantages = decode_group(data), decode_advantages(data)
        if group.ticket != ticket or [one.session_id for one in group.trajectories] != sessions:
            problem = f"its file has other rollouts than were recorded ({len(sessions)} of ticket {ticket})"
            _refuse(facts, key, ticket, problem)
            return
        _note(facts, key, group, advantages)
    except (IntegrityError, struct.error) as error:
        _refuse(facts, key, ticket, str(error))


def _refuse(facts: Facts, key: str, ticket: int, problem: str) -> None:
    facts.sql.execute("INSERT INTO group_file(key, ticket, problem) VALUES(?, ?, ?)", (key, ticket, problem))


def _note(facts: Facts, key: str, group: Group, advantages: Sequence[float | None]) -> None:
    nodes = [row for one in group.trajectories for row in _nodes(group.ticket, one)]
    versions = [
        run.version for one in group.trajectories for node in one.nodes for run in node.completion.versions if run.count
    ]
    facts.sql.execute(
        "INSERT INTO group_file VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, '')",
        (
            key,
            group.ticket,
            group.task_id,
            group.admitted_version,
            sum(map(_drawn, group.trajectories)),
            oldest_version(group.trajectories),
            max(versions, default=None),
            msgspec.json.encode([one.reward for one in group.trajectories]).decode(),
            msgspec.json.encode(advantages).decode(),
        ),
    )
    facts.sql.executemany(
        "INSERT INTO member VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                group.ticket,
                one.session_id,
                one.rollout_id,
                one.outcome.value,
                one.reward,
                _drawn(one),
                sum(bool(node.completion.token_ids) for node in one.nodes),
                one.metrics.get("gateway/calls_abandoned", 0.0),
            )
            for one in group.trajectories
        ],
    )
    facts.sql.executemany("INSERT INTO node VALUES(?, ?, ?, ?, ?, ?)", nodes)
    note_trees(facts, group)


def _drawn(trajectory: Trajectory) -> int:
    return sum(len(node.completion.token_ids) for node in trajectory.nodes)


def _nodes(ticket: int, trajectory: Trajectory) -> list[tuple[object, ...]]:
    """Return what a sampler must have recorded of each call, with the prompt joined along its branch.

    A call for which nothing was drawn leaves no trace in a sampler.
    """
    by_id: dict[int, Node] = {}
    rows: list[tuple[object, ...]] = []
    if problem := tree_problem(trajectory.nodes):
        msg = f"rollout {trajectory.rollout_id} is no tree ({problem})"
        raise IntegrityError(msg)
    for node in trajectory.nodes:
        by_id[node.node_id] = node
        completion = node.completion
        tokens = len(completion.token_ids)
        if tokens:
            prompt, drawn = of_ids(_prompt(node, by_id)), of_drawn(completion)
            rows.append((ticket, trajectory.session_id, prompt, drawn, tokens, completion.lineage))
    return rows


def _prompt(node: Node, by_id: dict[int, Node]) -> list[int]:
    pieces = [node.prompt_ids]
    while node.parent is not None:
        node = by_id[node.parent]
        pieces += [node.completion.token_ids, node.prompt_ids]
    return [token_id for piece in reversed(pieces) for token_id in piece]


def note_rollout(facts: Facts, key: str, data: bytes, digest: str) -> None:
    """Take what a rollout's document says."""
    try:
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        row = (key, digest, "", "", "", "", None, None, f"damaged ({str(error)[:200]})")
    else:
        said = document.extra.etude
        drawn = document.final_metrics.total_completion_tokens if document.final_metrics else None
        row = (key, digest, said.rollout_id, said.task_id, said.purpose, said.outcome, said.reward, drawn, "")
    facts.sql.execute("INSERT INTO rollout_file VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def groups_are_what_was_recorded(case: Case, tally: Tally) -> None:
    """Check each group's file against its admission, and its rollouts against how they ended."""
    facts = case.facts
    query = """
        SELECT file.ticket, file.problem, file.task, file.admitted_version, admitted.task, admitted.version
        FROM group_file AS file LEFT JOIN admitted USING (ticket)
    """
    for ticket, problem, task, version, due_task, due_version in facts.rows(query):
        if problem:
            tally.check(f"{group_id(ticket)}: {problem}")
        else:
            same = (task, version) == (due_task, due_version)
            wrong = f"its file says task {task} at version {version}, admitted was {due_task} at {due_version}"
            tally.check("" if same else f"{group_id(ticket)}: {wrong}")
    query = """
        SELECT member.rollout, member.ticket, ended.session IS NOT NULL,
            ended.outcome = member.outcome AND ended.reward IS member.reward
            AND ended.drawn = member.drawn AND ended.rollout = member.rollout
        FROM member LEFT JOIN rollout_ended AS ended USING (session)
    """
    for rollout, _, known, same in facts.rows(query):
        if not known:
            tally.check(f"{rollout}: in a group, and no such session ever ended")
        else:
            tally.check(
                "" if same else f"{rollout}: its group's file says another outcome, reward or length than was recorded"
            )


def rollouts_say_what_happened(case: Case, tally: Tally) -> None:
    """Check each rollout's document against how the rollout ended."""
    facts = case.facts
    facts.sql.execute("CREATE INDEX rollout_ended_as ON rollout_ended(digest)")
    query = """
        SELECT file.key, file.problem, file.rollout = ended.rollout AND file.outcome = ended.outcome
            AND file.reward IS ended.reward AND coalesce(file.drawn, ended.drawn) = ended.drawn
            AND file.purpose = started.purpose AND file.task = started.task
        FROM rollout_file AS file JOIN rollout_ended AS ended USING (digest)
        LEFT JOIN rollout_started AS started USING (session)
    """
    for key, problem, same in facts.rows(query):
        if problem:
            tally.check(f"{key}: {problem}")
        else:
            tally.check("" if same else f"{key}: says something else than was recorded as the rollout ended")
