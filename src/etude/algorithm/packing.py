"""Samples in rows without padding: the first place where tensors appear."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from etude.algorithm.samples import Sample

Cost = Callable[[int], float]
"""Work that a sample of so many tokens causes, in any unit."""


class MicroBatch(NamedTuple):
    """Segments one after the other, and what is to be trained on them.

    A segment is a sample without its last token, which is never an input. Row `sources[i]` of the network's output
    predicts `drawn[i]`; both belong to one segment by construction.
    """

    token_ids: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    boundaries: tuple[int, ...]
    """Starts of the segments, and the end of the last."""
    replay: Int[Tensor, "tokens layers top_k"] | None
    sources: Int[Tensor, " trained"]
    drawn: Int[Tensor, " trained"]
    logq: Float[Tensor, " trained"]
    advantages: Float[Tensor, " trained"]
    versions: Int[Tensor, " trained"]
    pools: Int[Tensor, " trained"]
    """Index into `pool_names`."""
    pool_names: tuple[str, ...]
    support: Int[Tensor, "trained width"]
    """Ids that could have been drawn, -1 where padded; width 0 where no support was recorded."""
    support_logq: Float[Tensor, "trained width"]
    """-inf where padded."""


def sample_cost(linear: float, quadratic: float) -> Cost:
    """Return the cost a*L + b*L^2: matrix products grow with the tokens, attention with their square."""
    return lambda length: linear * length + quadratic * length**2


def pack(samples: Sequence[Sample], *, row_tokens: int, cost: Cost) -> list[MicroBatch]:
    """Return micro-batches of at most `row_tokens` tokens that cost about the same.

    A sample that is longer than that gets a row of its own: it is neither cut nor dropped.
    """
    lengths = [len(sample.token_ids) - 1 for sample in samples]
    return [batch_of([samples[index] for index in row]) for row in rows_of(lengths, row_tokens=row_tokens, cost=cost)]


def rows_of(lengths: Sequence[int], *, row_tokens: int, cost: Cost) -> list[list[int]]:
    """Return the indices that share a row: longest first, each into the cheapest row that has room."""
    count = max(1, -(-sum(lengths) // row_tokens)) if lengths else 0
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    costs = [0.0] * count
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        roomy = [row for row in range(len(rows)) if not rows[row] or filled[row] + lengths[index] <= row_tokens]
        if roomy:
            row = min(roomy, key=lambda row: costs[row])
        else:
            row = len(rows)
            rows.append([])
            filled.append(0)
            costs.append(0.0)
        rows[row].append(index)
        filled[row] += lengths[index]
        costs[row] += cost(lengths[index])
    return [sorted(row) for row in rows if row]


def batch_of(samples: Sequence[Sample]) -> MicroBatch:
    """Return one micro-batch of these samples, in their order."""
    lengths = [len(sample.token_ids) - 1 for sample in samples]
    boundaries = np.concatenate(([0], np.cumsum(lengths)))
    pool_names = sorted({name for sample in samples for name in sample.pool_names})
    targets = [np.flatnonzero(sample.trained) for sample in samples]
    support, support_logq = _padded_supports(samples, targets)
    replays = [sample.experts[:-1] for sample in samples if sample.experts is not None]

    def trained(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        chosen = [part[target] for part, target in zip(parts, targets, strict=True)]
        return torch.as_tensor(np.concatenate(chosen)).to(dtype)

    pools = [np.array([pool_names.index(name) for name in sample.pool_names])[sample.pools] for sample in samples]
    return MicroBatch(
        token_ids=torch.as_tensor(np.concatenate([sample.token_ids[:-1] for sample in samples])),
        positions=torch.as_tensor(np.concatenate([np.arange(length) for length in lengths])),
        boundaries=tuple(int(start) for start in boundaries),
        replay=torch.as_tensor(np.concatenate(replays)) if len(replays) == len(samples) else None,
        sources=torch.as_tensor(
            np.concatenate([start + target - 1 for start, target in zip(boundaries[:-1], targets, strict=True)])
        ),
        drawn=trained([sample.token_ids for sample in samples], torch.int64),
        logq=trained([sample.logq for sample in samples], torch.float32),
        advantages=trained([np.full(len(s.token_ids), s.advantage) for s in samples], torch.float32),
        versions=trained([sample.versions for sample in samples], torch.int64),
        pools=trained(pools, torch.int64),
        pool_names=tuple(pool_names),
        support=support,
        support_logq=support_logq,
    )


def _padded_supports(samples: Sequence[Sample], targets: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    counts = np.concatenate([sample.support_counts[target] for sample, target in zip(samples, targets, strict=True)])
    width = int(counts.max(initial=0))
    inside = np.arange(width) < counts[:, None]
    support = np.full((len(counts), width), -1, dtype=np.int64)
    support_logq = np.full((len(counts), width), -np.inf, dtype=np.float32)
    support[inside] = np.concatenate(
        [_trained_part(s, t, s.support_ids) for s, t in zip(samples, targets, strict=True)]
    )
    support_logq[inside] = np.concatenate(
        [_trained_part(s, t, s.support_logq) for s, t in zip(samples, targets, strict=True)]
    )
    return torch.as_tensor(support), torch.as_tensor(support_logq)


def _trained_part(sample: Sample, target: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Return the flat entries that belong to trained tokens."""
    return flat[np.repeat(sample.trained, sample.support_counts)] if len(target) else flat[:0]
