"""Drawing from truncated distributions, a whole batch at a time."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GROUP = 64
_FIRST_WIDTH = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Rules(NamedTuple):
    """How to draw, per row."""

    temperature: Tensor
    """f32[rows], above 0: greedy rows are `top_k` 1."""
    top_k: Tensor
    """i64[rows], between 1 and the vocabulary's size."""
    top_p: Tensor
    """f32[rows]."""


class Draw(NamedTuple):
    """One drawn token per row, and what could have been drawn."""

    tokens: Tensor
    """i64[rows]."""
    logprobs: Tensor
    """f32[rows], under the truncated and renormalised distribution."""
    counts: Tensor
    """i64[rows]: ids in the row's support; 0 where nothing was truncated, so that the support is the vocabulary."""
    support_ids: Tensor
    """i64[sum(counts)], ascending within a row."""
    support_logprobs: Tensor
    """f32[sum(counts)]."""
    sound: Tensor
    """bool[rows]: False where the logits were not numbers; such a row's token means nothing."""


def uniforms(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row that depends on the seed and the draw's index alone.

    A multiple of 2^-52: times a total near one it stays below the total, so an inverse CDF never runs off its end.
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (indices + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(logits: Tensor, rules: Rules, uniform: Tensor) -> Draw:
    """Draw one token per row of f32[rows, vocab] logits, by inverse CDF over the support in order of id.

    Truncation is top-k first, then the smallest set of the renormalised rest, most likely first, whose mass reaches
    top-p. In order of id, a change in the last bit moves an edge of the CDF but never reorders it.
    """
    whole = (rules.top_k >= logits.shape[1]) & (rules.top_p >= 1.0)
    if not bool(whole.any()):
        return _draw_truncated(logits, rules, uniform)
    part = _draw_whole(logits[whole], rules.temperature[whole], uniform[whole])
    if bool(whole.all()):
        return part
    rest = _draw_truncated(logits[~whole], Rules(*(rule[~whole] for rule in rules)), uniform[~whole])
    columns: list[Tensor] = []
    for name in ("tokens", "logprobs", "counts", "sound"):
        column = torch.empty_like(getattr(rest, name)).new_empty(len(logits))
        column[whole], column[~whole] = getattr(part, name), getattr(rest, name)
        columns.append(column)
    tokens, logprobs, counts, sound = columns
    return Draw(tokens, logprobs, counts, rest.support_ids, rest.support_logprobs, sound)


def most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest scores of each row, descending, and their columns.

    Each of them lies in one of the `count` groups of 64 columns with the highest maxima: on a large vocabulary that
    reads the scores once instead of partially sorting them.
    """
    vocab = scores.shape[1]
    groups = vocab // _GROUP
    if groups < 4 * count:
        values, ids = torch.topk(scores, count)
        return values, ids
    body = scores[:, : groups * _GROUP].view(len(scores), groups, _GROUP)
    best = torch.topk(body.amax(dim=2), count, sorted=False).indices[:, :, None]
    inside = torch.arange(_GROUP, device=scores.device)
    tail = torch.arange(groups * _GROUP, vocab, device=scores.device).expand(len(scores), -1)
    ids = torch.cat(((best * _GROUP + inside).flatten(1), tail), dim=1)
    values, places = torch.topk(scores.gather(1, ids), count)
    return values, ids.gather(1, places)


def _draw_truncated(logits: Tensor, rules: Rules, uniform: Tensor) -> Draw:
    vocab = logits.shape[1]
    values, ids, logprobs = _candidates(logits / rules.temperature[:, None], rules)
    probs = logprobs.exp()
    kept = ((probs.cumsum(dim=1) - probs) < rules.top_p[:, None]) & (probs > 0)
    ids, order = torch.where(kept, ids, vocab).sort(dim=1)
    logprobs = logprobs.masked_fill(~kept, -torch.inf).gather(1, order).log_softmax(dim=1)
    cdf = logprobs.double().exp().cumsum(dim=1)
    place = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    place = place.clamp_(max=ids.shape[1] - 1)  # only rows that are not sound reach the end
    supported = ids < vocab
    return Draw(
        tokens=ids.gather(1, place)[:, 0],
        logprobs=logprobs.gather(1, place)[:, 0],
        counts=supported.sum(dim=1),
        support_ids=ids[supported],
        support_logprobs=logprobs[supported],
        sound=values[:, 0].isfinite(),
    )


def _candidates(scores: Tensor, rules: Rules) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, ids and log-probabilities, after top-k, of enough columns for top-p; descending."""
    vocab = scores.shape[1]
    widest, narrowest = int(rules.top_k.max()), int(rules.top_k.min())
    if widest < vocab:
        values, ids = most_likely(scores, widest)
        if narrowest < widest:
            beyond = torch.arange(widest, device=scores.device) >= rules.top_k[:, None]
            values = values.masked_fill(beyond, -torch.inf)
        return values, ids, values.log_softmax(dim=1)
    total = scores.logsumexp(dim=1, keepdim=True)
    unlimited = rules.top_k >= vocab
    width = min(vocab, max(_FIRST_WIDTH, int(rules.top_k[~unlimited].max()) if not bool(unlimited.all()) else 0))
    while True:
        values, ids = most_likely(scores, width)
        beyond = torch.arange(width, device=scores.device) >= rules.top_k[:, None]
        values = values.masked_fill(beyond, -torch.inf)
        logprobs = torch.where(unlimited[:, None], values - total, values.log_softmax(dim=1))
        enough = ~unlimited | (logprobs.exp().sum(dim=1) >= rules.top_p)
        if width == vocab or bool(enough.all()):
            return values, ids, logprobs
        width = min(vocab, 4 * width)


def _draw_whole(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Draw:
    logprobs = (logits / temperature[:, None]).log_softmax(dim=1)
    cdf = logprobs.double().exp().cumsum(dim=1)
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
    return Draw(
        tokens=tokens[:, 0],
        logprobs=logprobs.gather(1, tokens)[:, 0],
        counts=torch.zeros_like(tokens[:, 0]),
        support_ids=tokens.new_empty(0),
        support_logprobs=logprobs.new_empty(0),
        sound=cdf[:, -1].isfinite(),
    )


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread each word's bits (the finaliser of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
