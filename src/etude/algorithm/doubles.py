"""Groups made from a seed: valid in every record, for tests and benchmarks that have no sampler."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.types import (
    Completion,
    Edge,
    Experts,
    FinishReason,
    Group,
    Node,
    Outcome,
    Support,
    Trajectory,
    VersionRun,
)


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of what `synthetic_group` makes; ranges are inclusive."""

    vocab_size: int = 64
    attempts: int = 4
    calls: tuple[int, int] = (1, 3)
    prompt_tokens: tuple[int, int] = (2, 12)
    """Of the first call; later calls add about half as many."""
    answer_tokens: tuple[int, int] = (1, 10)
    support_width: int = 8
    """Most ids of a support; 0 makes completions without one."""
    expert_layers: int = 0
    experts_per_token: int = 2
    num_experts: int = 4
    newest_version: int = 0
    pools: tuple[str, ...] = ("local",)


def synthetic_group(plan: GroupPlan, seed: int) -> Group:
    """Return a group of linear sessions with rewards 0 and 1; the same plan and seed give the same group."""
    rng = np.random.default_rng(seed)
    trajectories = tuple(
        Trajectory(
            rollout_id=f"g{seed}-{index}",
            group_id=f"g{seed}",
            task_id=f"t{seed}",
            index=index,
            outcome=Outcome.SCORED,
            # The first two differ, so that no group is without signal.
            reward=float(index) if index <= 1 else float(rng.integers(2)),
            nodes=_session(plan, rng),
        )
        for index in range(plan.attempts)
    )
    return Group(group_id=f"g{seed}", task_id=f"t{seed}", ticket=seed, admitted_version=0, trajectories=trajectories)


def _session(plan: GroupPlan, rng: np.random.Generator) -> tuple[Node, ...]:
    nodes: list[Node] = []
    length = 0
    low, high = plan.prompt_tokens
    for call in range(_between(rng, plan.calls)):
        added = _between(rng, (low, high) if call == 0 else (max(1, low // 2), max(1, high // 2)))
        node = Node(
            node_id=call,
            parent=call - 1 if call else None,
            edge=Edge.CONTINUATION if call else Edge.ROOT,
            prompt_ids=tuple(rng.integers(plan.vocab_size, size=added).tolist()),
            completion=_completion(plan, rng, length, added),
            started_s=float(call),
        )
        nodes.append(node)
        length += added + len(node.completion.token_ids)
    return tuple(nodes)


def _completion(plan: GroupPlan, rng: np.random.Generator, parent_length: int, added: int) -> Completion:
    drawn = _between(rng, plan.answer_tokens)
    width = plan.support_width or plan.vocab_size
    supports = [
        np.sort(rng.choice(plan.vocab_size, size=_between(rng, (1, width)), replace=False)) for _ in range(drawn)
    ]
    logprobs = [_log_softmax(rng.normal(size=len(ids))) for ids in supports]
    columns = [int(rng.integers(len(ids))) for ids in supports]
    support = Support(
        counts=np.array([len(ids) for ids in supports], dtype="<u2").tobytes(),
        token_ids=np.concatenate(supports).astype("<u4").tobytes(),
        logprobs=np.concatenate(logprobs).astype("<f4").tobytes(),
    )
    logq = [row[column] for row, column in zip(logprobs, columns, strict=True)]
    split = int(rng.integers(drawn + 1))
    oldest = int(rng.integers(plan.newest_version + 1))
    return Completion(
        token_ids=tuple(int(ids[column]) for ids, column in zip(supports, columns, strict=True)),
        sampler_logprobs=np.array(logq, dtype="<f4").tobytes(),
        versions=(VersionRun(oldest, split), VersionRun(plan.newest_version, drawn - split)),
        finish_reason=FinishReason.STOP,
        pool=plan.pools[int(rng.integers(len(plan.pools)))],
        support=support if plan.support_width else None,
        experts=_experts(plan, rng, max(0, parent_length - 1), parent_length + added + drawn - 1),
    )


def _experts(plan: GroupPlan, rng: np.random.Generator, start: int, end: int) -> Experts | None:
    if not plan.expert_layers:
        return None
    scores = rng.random((end - start, plan.expert_layers, plan.num_experts))
    chosen = np.sort(np.argsort(scores, axis=-1)[..., : plan.experts_per_token], axis=-1)
    return Experts(
        start=start,
        num_layers=plan.expert_layers,
        top_k=plan.experts_per_token,
        expert_ids=chosen.astype("<u2").tobytes(),
    )


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))
