"""The trees of sessions in group files: each edge fits its call, and no call is trained that must not be."""

import msgspec

from etude.algorithm.branches import branches_of
from etude.algorithm.trees import edge_counts, edge_problem
from etude.runtime.audit.case import Case
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.groups import group_id
from etude.telemetry.events import TrainedGroup
from etude.types import WITH_REWARD, Group, Trajectory

TABLES = """
CREATE TABLE tree(
    ticket INTEGER, rollout TEXT, session TEXT, calls INTEGER, edges TEXT, trainable INTEGER, auxiliary INTEGER,
    problem TEXT
);
"""
"""Of each rollout in a group's file: its calls by edge, and drawn tokens that may be trained on, or are auxiliary."""


def note_trees(facts: Facts, group: Group) -> None:
    """Take the trees of a group, each of which is one (`algorithm.trees.tree_problem`)."""
    facts.sql.executemany(
        "INSERT INTO tree VALUES(?, ?, ?, ?, ?, ?, ?, ?)", [_row(group.ticket, one) for one in group.trajectories]
    )


def _row(ticket: int, trajectory: Trajectory) -> tuple[object, ...]:
    nodes = trajectory.nodes
    drawn = {node.node_id: len(node.completion.token_ids) for node in nodes}
    found = branches_of(nodes)
    owned = [node_id for branch in found.branches for node_id in branch.owned]
    left_out = [node.node_id for node in (*found.superseded, *found.auxiliary)]
    problem = edge_problem(nodes)
    if not problem and sorted(owned + left_out) != sorted(drawn):
        problem = f"{len(owned)} calls belong to a branch and {len(left_out)} are left out, of {len(drawn)}"
    scored = trajectory.outcome in WITH_REWARD
    trainable = sum(drawn[node_id] for node_id in owned) if scored else 0
    auxiliary = sum(drawn[node.node_id] for node in found.auxiliary)
    edges = msgspec.json.encode(edge_counts(nodes)).decode()
    return ticket, trajectory.rollout_id, trajectory.session_id, len(nodes), edges, trainable, auxiliary, problem


def trees_are_sound(case: Case, tally: Tally) -> None:
    """Check each tree, and what the trainer says against what may be trained on."""
    for rollout, calls, problem in case.facts.rows("SELECT rollout, calls, problem FROM tree"):
        tally.checked(calls)
        if problem:
            tally.violate(f"{rollout}: {problem}")
    query = """
        SELECT tree.rollout, tree.edges, ended.edges FROM tree JOIN rollout_ended AS ended USING (session)
        WHERE ended.edges NOT IN (tree.edges, '{}')
    """
    for rollout, in_file, told in case.facts.rows(query):
        tally.violate(f"{rollout}: its calls are {in_file} in its group's file, {told} as it ended")
    for (groups,) in case.facts.rows("SELECT groups FROM trained"):
        for group in msgspec.json.decode(groups, type=list[TrainedGroup]):
            _check_trained(case, tally, group)


def _check_trained(case: Case, tally: Tally, group: TrainedGroup) -> None:
    ticket = group.group.removeprefix("g")
    query = "SELECT sum(trainable), sum(auxiliary) FROM tree WHERE ticket = ?"
    for trainable, auxiliary in case.facts.rows(query, int(ticket) if ticket.isdecimal() else -1):
        if trainable is None or group.group != group_id(int(ticket)):
            continue
        used = group.trained + sum(group.masked.values())
        if used > trainable:
            tally.violate(f"{group.group}: {used} tokens in samples, its trees have {trainable} that may be trained on")
        elif group.dropped.get("auxiliary", 0) > auxiliary:
            tally.violate(f"{group.group}: more tokens dropped as auxiliary than its auxiliary calls drew")
