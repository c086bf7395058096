"""What the record of a session's tree must satisfy to be a tree, and each of its edges to be what it says."""

from collections import Counter
from collections.abc import Sequence

from etude.types import Edge, Node

_EXTENDS = (Edge.CONTINUATION, Edge.SUBAGENT_RETURN)
_BEGINS = (Edge.ROOT, Edge.COMPACTION, Edge.SUBAGENT_CALL, Edge.REWRITE, Edge.TOOLS_CHANGED, Edge.UNEXTENDABLE)


def tree_problem(nodes: Sequence[Node]) -> str:
    """Return why nodes form no tree, in a few stable words; empty when they do.

    Parents come before their children, ids are unique, and a link names another call.
    """
    known = {node.node_id for node in nodes}
    seen: set[int] = set()
    for node in nodes:
        if node.node_id in seen or (node.parent is not None and node.parent not in seen):
            return "tree_broken"
        if node.link is not None and (node.link not in known or node.link == node.node_id):
            return "link_unknown"
        seen.add(node.node_id)
    return ""


def edge_problem(nodes: Sequence[Node]) -> str:
    """Return the first call of a tree that its edge does not fit, and why; empty when all fit."""
    by_id = {node.node_id: node for node in nodes}
    for node in nodes:
        problem = _problem(node, by_id)
        if problem:
            return f"call {node.node_id}, {node.edge.value}: {problem}"
    return ""


def edge_counts(nodes: Sequence[Node]) -> dict[str, int]:
    """Return how many calls have each edge, by its name."""
    return dict(sorted(Counter(node.edge.value for node in nodes).items()))


def _problem(node: Node, by_id: dict[int, Node]) -> str:
    if node.edge in _EXTENDS and node.parent is None:
        return "it extends no call"
    if node.edge in _BEGINS and node.parent is not None:
        return f"it extends call {node.parent}"
    if node.edge is Edge.SUBAGENT_RETURN and node.link is None:
        return "it names no answer that it brings"
    if node.edge is Edge.RETRY and node.link is not None:
        original = by_id[node.link]
        if (original.parent, original.prompt_ids) != (node.parent, node.prompt_ids):
            return f"its prompt is not that of call {node.link}"
    return ""
