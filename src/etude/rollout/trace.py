"""A rollout as the training trace that OpenEnv's tools read: one turn per model call, with all of its tokens.

The format is closed (readers refuse unknown keys). It holds no reward: that is in the rollout's document.
"""

import struct
from collections.abc import Mapping, Sequence

import msgspec

from etude.algorithm.branches import branches_of
from etude.types import Node, Trajectory

TRACE_VERSION = 1


class TrainingTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model call."""

    node_id: str
    """Unique within the trace."""
    prompt_token_ids: list[int]
    """All that the model read."""
    completion_token_ids: list[int]
    per_token_logps: list[float]
    """Of the drawn tokens, under the distribution that they were drawn from; never above 0."""
    loss_mask: list[int]
    """1 for drawn tokens, 0 for those of the prompt."""
    request: dict[str, object] = {}
    response: dict[str, object] = {}
    metadata: dict[str, object] = {}


class TrainingTrace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The calls of one rollout that can be trained on, parents before children."""

    schema_version: int = TRACE_VERSION
    turns: list[TrainingTurn]


def training_trace(trajectory: Trajectory, *, sampling: Mapping[str, object] | None = None) -> TrainingTrace:
    """Return the trace of a rollout whose record is valid; each drawn token that can be trained on is in it once.

    Calls that are not trained on are left out: auxiliary ones, repeated ones that led nowhere, and those for which
    nothing was drawn. `sampling` is the distribution that tokens were drawn from, for readers.
    """
    owned = {node_id for branch in branches_of(trajectory.nodes).branches for node_id in branch.owned}
    sequences: dict[int, list[int]] = {}
    turns: list[TrainingTurn] = []
    for node in trajectory.nodes:
        prompt = [*(() if node.parent is None else sequences[node.parent]), *node.prompt_ids]
        sequences[node.node_id] = [*prompt, *node.completion.token_ids]
        if node.node_id in owned and node.completion.token_ids:
            turns.append(_turn(node, prompt, sampling or {}))
    return TrainingTrace(turns=turns)


def _turn(node: Node, prompt: Sequence[int], sampling: Mapping[str, object]) -> TrainingTurn:
    completion = node.completion
    drawn = len(completion.token_ids)
    # Rounding puts the log of a certain token a little above 0, which readers take for damage.
    logps = [min(logp, 0.0) for logp in struct.unpack(f"<{drawn}f", completion.sampler_logprobs)]
    return TrainingTurn(
        node_id=f"n{node.node_id}",
        prompt_token_ids=list(prompt),
        completion_token_ids=list(completion.token_ids),
        per_token_logps=logps,
        loss_mask=[0] * len(prompt) + [1] * drawn,
        response={"finish_reason": completion.finish_reason.value},
        metadata={
            "parent": None if node.parent is None else f"n{node.parent}",
            "edge": node.edge.value,
            "reason": node.reason,
            "link": None if node.link is None else f"n{node.link}",
            "weight_version": [completion.versions[0].version, completion.versions[-1].version],
            "pool": completion.pool,
            "sampling": dict(sampling),
        },
    )
