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
    """All drawn tokens of a session: each node is owned by one branch, superseded, or auxiliary."""

    branches: tuple[Branch, ...]
    superseded: tuple[Node, ...]
    """Answers that the harness asked for again and that nobody continued."""
    auxiliary: tuple[Node, ...] = ()
    """Calls that are nothing of the task, with all that goes on from them."""


def branches_of(nodes: Sequence[Node]) -> Branches:
    """Return one branch per leaf, in the order in which the leaves were played.

    `nodes` form a valid tree (see `ingest.defect`).
    """
    auxiliary = _auxiliary(nodes)
    superseded = _superseded([node for node in nodes if node.node_id not in auxiliary])
    kept = [node for node in nodes if node.node_id not in superseded | auxiliary]
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
    return Branches(
        branches=tuple(branches),
        superseded=tuple(node for node in nodes if node.node_id in superseded),
        auxiliary=tuple(node for node in nodes if node.node_id in auxiliary),
    )


def _auxiliary(nodes: Sequence[Node]) -> set[int]:
    """Return the ids of auxiliary calls, of what extends them, and of their repetitions."""
    found = {node.node_id for node in nodes if node.edge is Edge.AUXILIARY}
    more = bool(found)
    while more:
        before = len(found)
        for node in nodes:
            repeats = node.link if node.edge is Edge.RETRY else None
            if node.parent in found or repeats in found:
                found.add(node.node_id)
        more = len(found) > before
    return found


def _superseded(nodes: Sequence[Node]) -> set[int]:
    """Return the ids of answers to a repeated prompt that led nowhere.

    Where none of a prompt's answers was continued, the last one ended the session and stands.
    """
    parents = {node.parent for node in nodes}
    first: dict[tuple[int | None, tuple[int, ...]], int] = {}
    answers: defaultdict[int, list[Node]] = defaultdict(list)
    repeated: set[int] = set()
    for node in nodes:
        prompt = (node.parent, node.prompt_ids)
        original = node.node_id
        if node.edge is Edge.RETRY:
            # Records of older versions do not say which call a retry repeats.
            original = first.get(prompt, original) if node.link is None else node.link
            repeated.add(original)
        first.setdefault(prompt, original)
        answers[original].append(node)
    superseded: set[int] = set()
    for original in repeated:
        idle = sorted((node for node in answers[original] if node.node_id not in parents), key=_played)
        stands = len(idle) == len(answers[original])
        superseded |= {node.node_id for node in (idle[:-1] if stands else idle)}
    return superseded


def _played(node: Node) -> tuple[float, int]:
    return node.started_s, node.node_id


def _path(leaf: Node, by_id: dict[int, Node]) -> tuple[Node, ...]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(by_id[path[-1].parent])
    return tuple(reversed(path))
