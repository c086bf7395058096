"""Gradients of one micro-batch, unnormalised."""

from typing import NamedTuple

import torch
from torch import Tensor

from etude.algorithm.corrections import Correction, correction_of
from etude.algorithm.diagnostics import TokenRecord
from etude.algorithm.losses import TokenLoss, reinforce, score_centred
from etude.algorithm.packing import MicroBatch
from etude.errors import ConfigError
from etude.learning_config import AlgorithmSection
from etude.policy.decoder import Decoder
from etude.policy.logprobs import chunks, support_logits, support_rows


class Recipe(NamedTuple):
    """The loss, and the distribution whose log-probabilities it is about."""

    algorithm: AlgorithmSection
    correction: Correction
    temperature: float
    on_support: bool
    """Normalise over each token's support instead of the whole vocabulary."""


class BatchResult(NamedTuple):
    """What is known after a micro-batch's gradients were added."""

    loss_sum: float
    record: TokenRecord
    replaced: int
    """Replayed expert slots given to the router's own choice."""
    replayed: int
    """Expert slots with a route to replay."""


def recipe_of(algorithm: AlgorithmSection, *, temperature: float, truncated: bool) -> Recipe:
    """Return the recipe for tokens drawn at this temperature, from a support if `truncated`.

    Raises:
        ConfigError: The loss needs supports, and none are recorded or replayed.
    """
    on_support = truncated and algorithm.replay_support
    if algorithm.loss == "sc_mis" and not on_support:
        raise ConfigError("algorithm.loss = 'sc_mis' needs truncated sampling and algorithm.replay_support = true")
    return Recipe(algorithm, correction_of(algorithm), temperature, on_support)


def add_gradients(decoder: Decoder, batch: MicroBatch, recipe: Recipe) -> BatchResult:
    """Add the gradients of the batch's summed loss to the decoder's parameters."""
    replay = batch.replay if recipe.algorithm.replay_experts else None
    encoded = decoder(
        batch.token_ids,
        batch.positions,
        batch.boundaries,
        replay=replay,
        plausibility=recipe.algorithm.replay_plausibility,
    )
    hidden = encoded.hidden.index_select(0, batch.sources)
    if recipe.on_support:
        rows, columns = support_rows(decoder.head, batch.support)
        width = max(len(rows), columns.shape[1])
    else:
        rows, columns, width = decoder.head, batch.support, len(decoder.head)
    # The head's graph lives one chunk at a time: its gradients gather in these leaves and enter the network once.
    hidden_leaf, rows_leaf = hidden.detach().requires_grad_(), rows.detach().requires_grad_()
    parts: list[TokenLoss] = []
    for part in chunks(len(batch.drawn), width):
        loss = _chunk_loss(hidden_leaf[part], rows_leaf, columns[part], batch, part, recipe)
        loss.total.backward()  # pyright: ignore[reportUnknownMemberType]
        parts.append(loss._replace(total=loss.total.detach()))
    torch.autograd.backward([hidden, rows], [_grad(hidden_leaf), _grad(rows_leaf)])
    return BatchResult(
        loss_sum=float(sum(part.total.item() for part in parts)),
        record=_record(batch, parts),
        replaced=int(encoded.replaced),
        replayed=0 if replay is None else int((replay >= 0).sum()),
    )


def _chunk_loss(
    hidden: Tensor, rows: Tensor, columns: Tensor, batch: MicroBatch, part: slice, recipe: Recipe
) -> TokenLoss:
    drawn, advantages = batch.drawn[part], batch.advantages[part]
    if not recipe.on_support:
        logits = (hidden @ rows.T).float()
        return reinforce(logits, drawn, batch.logq[part], advantages, recipe.correction, temperature=recipe.temperature)
    logits = support_logits(hidden, rows, columns)
    place = (batch.support[part] == drawn[:, None]).int().argmax(dim=1)
    if recipe.algorithm.loss == "sc_mis":
        return score_centred(
            logits, place, batch.support_logq[part], advantages, recipe.correction, temperature=recipe.temperature
        )
    return reinforce(logits, place, batch.logq[part], advantages, recipe.correction, temperature=recipe.temperature)


def _record(batch: MicroBatch, parts: list[TokenLoss]) -> TokenRecord:
    return TokenRecord(
        log_ratio=torch.cat([part.logp for part in parts]) - batch.logq,
        weight=torch.cat([part.weight for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        pull=torch.cat([part.pull for part in parts]),
        support_size=(batch.support >= 0).sum(dim=1),
        versions=batch.versions,
        pools=batch.pools,
    )


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
