"""Mixture-of-experts layers: routing, replay of the sampler's routes, and the experts themselves."""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F


class Routes(NamedTuple):
    """Where each token goes."""

    experts: Int[Tensor, "tokens top_k"]
    """Sorted ascending."""
    gates: Float[Tensor, "tokens top_k"]
    replaced: Int[Tensor, ""]
    """Replayed slots that the plausibility filter gave to the router's own choice."""


def route(
    logits: Float[Tensor, "tokens experts"],
    *,
    top_k: int,
    norm_topk: bool,
    replay: Int[Tensor, "tokens top_k"] | None = None,
    plausibility: float = 0.5,
) -> Routes:
    """Choose experts per token; the gates are always the router's own scores, so that gradients reach it.

    Rows of `replay` name the sampler's experts (distinct), or start with -1 where they are unknown. A replayed expert
    is kept if its score reaches `plausibility` times the router's own weakest choice; freed slots go to the router's
    own choices, best first. 0 replays everything, 1 amounts to no replay.
    """
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    own_scores, own = scores.detach().topk(top_k, dim=-1)
    replaced = torch.zeros((), dtype=torch.int64, device=logits.device)
    chosen = own
    if replay is not None:
        known = replay[:, :1] >= 0
        replay = torch.where(known, replay.long(), own)
        kept = scores.detach().gather(1, replay) >= plausibility * own_scores[:, -1:]
        replaced = (~kept).sum()
        # Kept experts rank before the router's own choices, which rank by score: the best k fill the slots.
        rank = torch.zeros_like(scores).scatter_(1, own, 1.0 + own_scores)
        rank = rank.scatter_add_(1, replay, 3.0 * kept.float())
        chosen = rank.topk(top_k, dim=-1).indices
    # One order whatever chose them, so that replaying the router's own choice changes no bit.
    chosen = chosen.sort(dim=-1).values
    gates = scores.gather(1, chosen)
    if norm_topk:
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return Routes(chosen, gates.to(logits.dtype), replaced)


def mix_experts(
    hidden: Float[Tensor, "tokens hidden"],
    routes: Routes,
    gate_up: Shaped[Tensor, "experts gate_up hidden"],
    down: Shaped[Tensor, "experts hidden inner"],
) -> Float[Tensor, "tokens hidden"]:
    """Return the gated sum of each token's experts; each expert runs once, over its own tokens only."""
    top_k = routes.experts.shape[1]
    flat = routes.experts.flatten()
    order = flat.argsort(stable=True)
    counts = cast("list[int]", torch.bincount(flat, minlength=gate_up.shape[0]).tolist())  # pyright: ignore[reportUnknownMemberType]
    inputs = torch.split(hidden.index_select(0, order // top_k), counts)
    outputs = [
        dense(tokens, expert_gate_up, expert_down)
        for tokens, expert_gate_up, expert_down in zip(inputs, gate_up.unbind(), down.unbind(), strict=True)
    ]
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    mixed = torch.cat(outputs).index_select(0, places).view(-1, top_k, hidden.shape[1])
    return (mixed * routes.gates[:, :, None]).sum(dim=1)


def dense(
    hidden: Float[Tensor, "tokens hidden"],
    gate_up: Shaped[Tensor, "gate_up hidden"],
    down: Shaped[Tensor, "hidden inner"],
) -> Float[Tensor, "tokens hidden"]:
    """Return one gated feed-forward block: rows of `gate_up` are the gate's, then the up-projection's."""
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
