"""A session's tree as the branches that samples are made of."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from etude.types import Edge, Node


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A path from a root to a leaf: exactly what the sampler saw and drew in that conversation."""

    nodes: tuple[Node, ...]
    owned: frozenset[int]
    """Ids of the nodes that are trained in this branch; nodes shared with an earlier branch are trained there."""


class Branches(msgspec.Struct, frozen=True, kw_only=True):
    """All drawn tokens of a session: each node is owned by one branch, or superseded."""

    branches: tuple[Branch, ...]
    superseded: tuple[Node, ...]
    """Answers that the harness asked for again and that nobody continued."""


def branches_of(nodes: Sequence[Node]) -> Branches:
    """Return one branch per leaf, in the order in which the leaves were played.

    `nodes` form a valid tree (see `ingest.defect`).
    """
    superseded = _superseded(nodes)
    kept = [node for node in nodes if node.node_id not in superseded]
    by_id = {node.node_id: node for node in kept}
    parents = {node.parent for node in kept}
    leaves = sorted((node for node in kept if node.node_id not in parents), key=_played)
    seen: set[int] = set()
    branches: list[Branch] = []
    for leaf in leaves:
        path = _path(leaf, by_id)
        owned = frozenset(node.node_id for node in path) - seen
        seen |= owned
        branches.append(Branch(nodes=path, owned=owned))
    return Branches(branches=tuple(branches), superseded=tuple(node for node in nodes if node.node_id in superseded))


def _superseded(nodes: Sequence[Node]) -> set[int]:
    """Return the ids of answers to a repeated prompt that led nowhere.

    Where none of a prompt's answers was continued, the last one ended the session and stands.
    """
    parents = {node.parent for node in nodes}
    asked: defaultdict[tuple[int | None, tuple[int, ...]], list[Node]] = defaultdict(list)
    for node in nodes:
        asked[node.parent, node.prompt_ids].append(node)
    superseded: set[int] = set()
    for answers in asked.values():
        if not any(node.edge is Edge.RETRY for node in answers):
            continue
        idle = sorted((node for node in answers if node.node_id not in parents), key=_played)
        stands = len(idle) == len(answers)
        superseded |= {node.node_id for node in (idle[:-1] if stands else idle)}
    return superseded


def _played(node: Node) -> tuple[float, int]:
    return node.started_s, node.node_id


def _path(leaf: Node, by_id: dict[int, Node]) -> tuple[Node, ...]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(by_id[path[-1].parent])
    return tuple(reversed(path))
