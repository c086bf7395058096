"""Next-token training on documents: what `pretrain` and `sft` do before RL starts."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from etude.learning_config import OptimizerSection
from etude.policy.decoder import Decoder
from etude.policy.logprobs import chunks
from etude.training.muon import Muon

_COOLDOWN = 0.5
"""Share of the steps over which the learning rate falls to nothing."""


class Document(NamedTuple):
    """Tokens, and which of them are to be learned."""

    token_ids: list[int]
    learned: list[bool]


class SupervisedStep(NamedTuple):
    """What one optimizer step saw."""

    step: int
    num_steps: int
    loss: float
    """Mean over the learned tokens, in nats."""
    tokens: int


def rows_of(documents: Sequence[Document], *, batch_tokens: int, random: Random) -> Iterator[list[Document]]:
    """Yield one epoch in random order, as many documents together as fit `batch_tokens`."""
    order = list(documents)
    random.shuffle(order)
    row: list[Document] = []
    for document in order:
        if row and sum(len(other.token_ids) for other in row) + len(document.token_ids) > batch_tokens:
            yield row
            row = []
        row.append(document)
    if row:
        yield row


def train_supervised(
    decoder: Decoder,
    rows: Sequence[list[Document]],
    optimizer: OptimizerSection,
    *,
    on_step: Callable[[SupervisedStep], None],
) -> None:
    """Take one optimizer step per row, with a warm-up and a falling learning rate.

    Matrices inside the blocks are updated by Muon, everything else by AdamW. `on_step` hears of every step.
    """
    inner = [parameter for parameter in decoder.layers.parameters() if parameter.ndim > 1]
    chosen = {id(parameter) for parameter in inner}
    outer = [parameter for parameter in decoder.parameters() if id(parameter) not in chosen]
    muon = Muon(inner)
    adamw = torch.optim.AdamW(
        outer,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        fused=True,
    )
    for step, row in enumerate(rows, start=1):
        rate = optimizer.lr * _schedule(step, len(rows), optimizer.warmup_steps)
        loss, learned = _loss(decoder, row)
        (loss / learned).backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), optimizer.grad_clip)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()  # pyright: ignore[reportUnknownMemberType]
        adamw.zero_grad()
        muon.step(rate)
        tokens = sum(len(document.token_ids) for document in row)
        on_step(SupervisedStep(step, len(rows), loss.item() / learned, tokens))


def _schedule(step: int, num_steps: int, warmup_steps: int) -> float:
    warm = min(1.0, step / (warmup_steps + 1))
    return warm * min(1.0, (num_steps - step + 1) / (_COOLDOWN * num_steps))


def _loss(decoder: Decoder, row: list[Document]) -> tuple[Float[Tensor, ""], int]:
    """Return the summed loss over the learned tokens of packed documents, and their number."""
    inputs: list[int] = []
    positions: list[int] = []
    boundaries = [0]
    sources: list[int] = []
    targets: list[int] = []
    for ids, learned in row:
        start = len(inputs)
        inputs += ids[:-1]
        positions += range(len(ids) - 1)
        boundaries.append(len(inputs))
        wanted = [place for place in range(len(ids) - 1) if learned[place + 1]]
        sources += [start + place for place in wanted]
        targets += [ids[place + 1] for place in wanted]
    hidden = decoder(torch.tensor(inputs), torch.tensor(positions), boundaries).hidden
    return _cross_entropy(hidden[torch.tensor(sources)], decoder.head, torch.tensor(targets)), len(targets)


def _cross_entropy(
    hidden: Float[Tensor, "tokens hidden"], head: Float[Tensor, "vocab hidden"], targets: Int[Tensor, " tokens"]
) -> Float[Tensor, ""]:
    total = hidden.new_zeros(())
    for part in chunks(len(targets), len(head)):
        total = total + F.cross_entropy((hidden[part] @ head.T).float(), targets[part], reduction="sum")
    return total
