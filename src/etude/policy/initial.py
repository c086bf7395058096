"""Weights of a policy made from nothing, scaled so that it learns from the first step."""

import torch

from etude.policy.decoder import Decoder
from etude.policy.shape import PolicyShape

_EMBEDDING_STD = 0.1
_ROUTER_STD = 0.02


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
