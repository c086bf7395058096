"""A session as the training trace that OpenEnv's tools read: one turn per model call, with all of its tokens.

The format is closed (readers refuse unknown keys). It holds no reward: that is in the rollout's document.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from etude.algorithm.branches import branches_of
from etude.types import Completion, Node

TRACE_VERSION = 1


class TrainingTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model call."""

    node_id: str
    """Unique within the trace."""
    prompt_token_ids: tuple[int, ...]
    """All that the model read."""
    completion_token_ids: tuple[int, ...]
    per_token_logps: list[float]
    """Of the drawn tokens, under the distribution that they were drawn from; never above 0."""
    loss_mask: list[int]
    """1 for drawn tokens, 0 for those of the prompt."""
    request: dict[str, object] = {}
    response: dict[str, object] = {}
    metadata: dict[str, object] = {}


class TrainingTrace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The calls of one session that can be trained on, parents before children."""

    schema_version: int = TRACE_VERSION
    turns: list[TrainingTurn]


def training_trace(nodes: Sequence[Node], *, sampling: Mapping[str, object] | None = None) -> TrainingTrace:
    """Return the trace of a session, all of its turns at once; see `training_turns`."""
    return TrainingTrace(turns=list(training_turns(nodes, sampling=sampling)))


def training_turns(nodes: Sequence[Node], *, sampling: Mapping[str, object] | None = None) -> Iterator[TrainingTurn]:
    """Yield the turns of a session whose tree is valid; each drawn token that can be trained on is in one of them.

    Calls that are not trained on are left out: auxiliary ones, repeated ones that led nowhere, and those for which
    nothing was drawn. `sampling` is the distribution that tokens were drawn from, for readers.
    """
    owned = {node_id for branch in branches_of(nodes).branches for node_id in branch.owned}
    sequences: dict[int, tuple[int, ...]] = {}
    for node in nodes:
        prompt = (() if node.parent is None else sequences[node.parent]) + node.prompt_ids
        sequences[node.node_id] = prompt + node.completion.token_ids
        if node.node_id in owned and node.completion.token_ids:
            yield _turn(node, prompt, sampling or {})


def _turn(node: Node, prompt: tuple[int, ...], sampling: Mapping[str, object]) -> TrainingTurn:
    completion = node.completion
    return TrainingTurn(
        node_id=node_name(node.node_id),
        prompt_token_ids=prompt,
        completion_token_ids=completion.token_ids,
        per_token_logps=logprobs_of(completion),
        loss_mask=[0] * len(prompt) + [1] * len(completion.token_ids),
        response={"finish_reason": completion.finish_reason.value},
        metadata={**where_it_hangs(node), "sampling": dict(sampling)},
    )


def node_name(node_id: int) -> str:
    """Return what a node is called in exported documents."""
    return f"n{node_id}"


def logprobs_of(completion: Completion) -> list[float]:
    """Return the log-probability of each drawn token; 0 where rounding put one above it, which readers call damage."""
    drawn = len(completion.token_ids)
    return [min(logp, 0.0) for logp in struct.unpack(f"<{drawn}f", completion.sampler_logprobs)]


def where_it_hangs(node: Node) -> dict[str, object]:
    """Return a call's place in its session's tree, and what answered it: versions as the first and the last."""
    completion = node.completion
    return {
        "parent": None if node.parent is None else node_name(node.parent),
        "edge": node.edge.value,
        "reason": node.reason,
        "link": None if node.link is None else node_name(node.link),
        "weight_version": [completion.versions[0].version, completion.versions[-1].version],
        "lineage": completion.lineage,
        "pool": completion.pool,
    }
