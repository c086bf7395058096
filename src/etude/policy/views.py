"""Precisions in which a fleet holds the same policy version."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

View = Literal["fp32", "bf16", "fp8"]

E4M3_MAX = 448.0


def view_dtype(view: View) -> torch.dtype:
    """Return the dtype in which a sampler of this view holds and multiplies its weights."""
    return torch.bfloat16 if view == "bf16" else torch.float32


def to_view(name: str, tensor: Tensor, view: View) -> Tensor:
    """Return a version's tensor as a fleet of this view holds it; the same input gives the same bits everywhere.

    `name` is the Hugging Face name: `fp8` rounds the linear layers only, and leaves embeddings, norms, biases, routers
    and the language-model head as they are, as quantised deployments do.
    """
    if view == "fp8" and name.endswith("_proj.weight"):
        return round_rows_to_e4m3(tensor.float())
    return tensor.to(view_dtype(view))


def round_rows_to_e4m3(weights: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Return the nearest values that float8_e4m3 can hold with one fp32 scale per row.

    A row's largest magnitude becomes 448, the largest e4m3 number: no value saturates. A scale is never subnormal, for
    such a one may round to 0.
    """
    largest = weights.abs().amax(dim=1, keepdim=True)
    scale = (largest / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (weights / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale
