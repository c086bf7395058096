"""A policy made from nothing: its shape, and weights scaled so that it learns from the first step."""

import torch

from etude.config import ShapeSection
from etude.policy.decoder import Decoder
from etude.policy.shape import PolicyShape

_EMBEDDING_STD = 0.1
_ROUTER_STD = 0.02


def shape_from(size: ShapeSection, *, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> PolicyShape:
    """Return a Qwen3 of the configured size: a mixture of experts, or dense with one expert."""
    dense = size.experts == 1
    return PolicyShape(
        model_type="qwen3" if dense else "qwen3_moe",
        vocab_size=vocab_size,
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        ffn_hidden=size.expert_hidden if dense else size.expert_hidden * size.experts_per_token,
        experts=0 if dense else size.experts,
        experts_per_token=0 if dense else size.experts_per_token,
        expert_hidden=0 if dense else size.expert_hidden,
        norm_topk=not dense,
        qk_norm=True,
        max_context=size.context,
        eos_token_ids=eos_token_ids,
    )


def initial_policy(shape: PolicyShape, seed: int) -> Decoder:
    """Return an untrained float32 decoder; the same shape and seed give the same weights.

    Every matrix keeps the size of what it is given (deviation 1/sqrt of its inputs), what is added to the residual
    stream is damped by the number of additions, routers start near even, and the head starts at zero: the first
    prediction is uniform.
    """
    decoder = Decoder(shape, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in decoder.hf_tensors().items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            elif name.endswith(".bias") or name == "lm_head.weight":
                tensor.zero_()
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * _deviation(name, tensor, shape))
    return decoder


def _deviation(name: str, tensor: torch.Tensor, shape: PolicyShape) -> float:
    if name == "model.embed_tokens.weight":
        return _EMBEDDING_STD
    if name.endswith("mlp.gate.weight"):
        return _ROUTER_STD
    deviation = tensor.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= (2 * shape.layers) ** 0.5
    return deviation
