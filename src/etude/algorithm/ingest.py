"""What a trajectory must satisfy before any of it is trained on.

A record that fails is not clipped, guessed or scored: the whole rollout is left out and counted by reason.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.algorithm.trees import tree_problem
from etude.types import Completion, Experts, Node, Support, Trajectory

_PROBABILITY_SLACK = 1e-3
_ID_MAX = 1 << 31


class IngestRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer's policy allows a record to claim."""

    vocab_size: int
    newest_version: int
    """No token can have been drawn with a later version than the trainer made."""
    expert_layers: int = 0
    """MoE layers; 0 when experts are not replayed."""
    experts_per_token: int = 0
    num_experts: int = 0


def defect(trajectory: Trajectory, rules: IngestRules) -> str:
    """Return why the trajectory cannot be trained on, in a few stable words; empty when it can."""
    found = tree_problem(trajectory.nodes)
    if found:
        return found
    lengths: dict[int, int] = {}
    for node in trajectory.nodes:
        start = 0 if node.parent is None else lengths[node.parent]
        prompt_end = start + len(node.prompt_ids)
        lengths[node.node_id] = prompt_end + len(node.completion.token_ids)
        found = _node_defect(node, rules, start=start, prompt_end=prompt_end)
        if found:
            return found
    return ""


def _node_defect(node: Node, rules: IngestRules, *, start: int, prompt_end: int) -> str:
    completion = node.completion
    drawn = len(completion.token_ids)
    if prompt_end == 0:
        return "prompt_empty"
    if not _ids_within(node.prompt_ids, rules.vocab_size) or not _ids_within(completion.token_ids, rules.vocab_size):
        return "token_unknown"
    if len(completion.sampler_logprobs) != 4 * drawn:
        return "logprobs_length"
    logq = np.frombuffer(completion.sampler_logprobs, "<f4")
    if not bool(np.all(np.isfinite(logq) & (logq <= _PROBABILITY_SLACK))):
        return "logprobs_invalid"
    found = _versions_defect(completion, rules.newest_version)
    if not found and completion.support is not None:
        found = _support_defect(completion, completion.support, rules.vocab_size)
    if not found and rules.expert_layers and completion.experts is not None:
        found = _experts_defect(completion.experts, rules, start=start, end=prompt_end + drawn)
    return found


def _ids_within(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def _versions_defect(completion: Completion, newest: int) -> str:
    versions = [run.version for run in completion.versions]
    if sum(run.count for run in completion.versions) != len(completion.token_ids):
        return "versions_length"
    if any(run.count < 0 for run in completion.versions) or versions != sorted(versions):
        return "versions_fall"
    if versions and not 0 <= versions[0] <= versions[-1] <= newest:
        return "versions_unknown"
    return ""


def _support_defect(completion: Completion, support: Support, vocab_size: int) -> str:
    drawn = np.array(completion.token_ids, dtype=np.int64)
    if len(support.counts) != 2 * len(drawn):
        return "support_length"
    counts = np.frombuffer(support.counts, "<u2").astype(np.int64)
    total = int(counts.sum())
    if len(support.token_ids) != 4 * total or len(support.logprobs) != 4 * total:
        return "support_length"
    if not total:
        return ""
    ids = np.frombuffer(support.token_ids, "<u4").astype(np.int64)
    logprobs = np.frombuffer(support.logprobs, "<f4").astype(np.float64)
    rows = np.repeat(np.arange(len(counts)), counts)
    if int(ids.max()) >= vocab_size or np.any((np.diff(ids) <= 0) & (np.diff(rows) == 0)):
        return "support_ids"
    # NaN and infinities fail here as well: no comparison with them holds.
    mass = np.bincount(rows, weights=np.exp(logprobs), minlength=len(counts))
    if not bool(np.all(np.abs(mass[counts > 0] - 1.0) <= _PROBABILITY_SLACK)):
        return "support_mass"
    return _drawn_defect(completion, drawn, counts, ids, logprobs, rows)


def _drawn_defect(
    completion: Completion,
    drawn: NDArray[np.int64],
    counts: NDArray[np.int64],
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    rows: NDArray[np.int64],
) -> str:
    """Check that each drawn token is in its support, with the log-probability that was returned for it."""
    hits = np.flatnonzero(ids == drawn[rows])
    if len(hits) != int((counts > 0).sum()):
        return "support_misses_token"
    logq = np.frombuffer(completion.sampler_logprobs, "<f4").astype(np.float64)
    if not bool(np.all(np.abs(logprobs[hits] - logq[rows[hits]]) <= _PROBABILITY_SLACK)):
        return "support_disagrees"
    return ""


def _experts_defect(experts: Experts, rules: IngestRules, *, start: int, end: int) -> str:
    """Check that the routes cover the call's positions: from the parent's last token to the last but one."""
    if (experts.num_layers, experts.top_k) != (rules.expert_layers, rules.experts_per_token):
        return "experts_shape"
    first = max(0, start - 1)
    row_bytes = 2 * experts.num_layers * experts.top_k
    if experts.start != first or len(experts.expert_ids) != max(0, end - 1 - first) * row_bytes:
        return "experts_positions"
    ids = np.frombuffer(experts.expert_ids, "<u2").reshape(-1, experts.top_k).astype(np.int32)
    if ids.size and (int(ids.max()) >= rules.num_experts or bool(np.any(np.diff(ids, axis=1) <= 0))):
        return "experts_ids"
    return ""
