"""Logits of many tokens without a [tokens, vocabulary] matrix of the whole batch."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK_LOGITS = 1 << 23
"""Logits alive at once: 32 MiB of float32."""


def chunk_tokens(columns: int) -> int:
    """Return how many tokens to evaluate together when each has so many logits."""
    return max(16, _CHUNK_LOGITS // max(1, columns))


def chunks(tokens: int, columns: int) -> Iterator[slice]:
    """Yield slices that cover `tokens`, each small enough for its logits to fit the budget."""
    size = chunk_tokens(columns)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def support_rows(
    head: Float[Tensor, "vocab hidden"], support: Int[Tensor, "tokens width"]
) -> tuple[Float[Tensor, "rows hidden"], Int[Tensor, "tokens width"]]:
    """Return the head's rows that any of the supports names, and the supports as indices into them.

    Tokens of a batch share most of their supports, so that the union is far smaller than a large vocabulary and one
    dense product with it is faster than gathering rows per token. -1 (padding) stays -1.
    """
    used = torch.zeros(len(head) + 1, dtype=torch.bool, device=head.device)
    used[support.flatten()] = True  # -1 marks the extra last entry
    rows = used[:-1].nonzero()[:, 0]
    if 2 * len(rows) > len(head):
        return head, support
    place = torch.full((len(head) + 1,), -1, dtype=torch.int64, device=head.device)
    place[rows] = torch.arange(len(rows), device=head.device)
    return head.index_select(0, rows), place[support]


def support_logits(
    hidden: Float[Tensor, "tokens hidden"], rows: Float[Tensor, "rows hidden"], support: Int[Tensor, "tokens width"]
) -> Float[Tensor, "tokens width"]:
    """Return float32 logits of each token's own support; padding is -inf."""
    logits = (hidden @ rows.T).float()
    return logits.gather(1, support.clamp(min=0)).masked_fill(support < 0, float("-inf"))
