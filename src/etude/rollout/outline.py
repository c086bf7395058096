"""A session's tree as people read it: for each call what it is, why, and how much it cost."""

from collections.abc import Mapping, Sequence

from etude.rollout.atif import Call
from etude.types import Node

_MOST_CALLS = 4096


def outline(nodes: Sequence[Node], tool_names: Mapping[int, Sequence[str]]) -> tuple[Call, ...]:
    """Return the first 4,096 calls, parents before children."""
    return tuple(_call(node, tool_names.get(node.node_id, ())) for node in nodes[:_MOST_CALLS])


def _call(node: Node, tools: Sequence[str]) -> Call:
    completion = node.completion
    versions = [run.version for run in completion.versions]
    return Call(
        node=node.node_id,
        parent=node.parent,
        edge=node.edge.value,
        reason=node.reason,
        link=node.link,
        prompt_tokens=len(node.prompt_ids),
        drawn_tokens=len(completion.token_ids),
        versions=(min(versions), max(versions)) if versions else None,
        finish_reason=completion.finish_reason.value,
        tools=tuple(tools),
        started_s=round(node.started_s, 3),
        seconds=round(node.seconds, 3),
    )
