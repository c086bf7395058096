"""A session's tree as people read it: for each call what it is, why, and how much it cost."""

from collections.abc import Mapping, Sequence

from etude.rollout.atif import Call
from etude.rollout.untrusted import as_list, as_mapping, as_text
from etude.types import Node

_MOST_CALLS = 4096
_MOST_TOOLS, _MOST_NAME_CHARS = 16, 64


def outline(nodes: Sequence[Node], answers: Mapping[int, Mapping[str, object]]) -> tuple[Call, ...]:
    """Return the first 4,096 calls, parents before children; `answers` are assistant's messages, by node."""
    return tuple(_call(node, _tools(answers.get(node.node_id, {}))) for node in nodes[:_MOST_CALLS])


def _tools(answer: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the tools that an answer calls, the first 16."""
    calls = as_list(answer.get("tool_calls"))[:_MOST_TOOLS]
    return tuple(as_text(as_mapping(as_mapping(call).get("function")).get("name"))[:_MOST_NAME_CHARS] for call in calls)


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
