"""Rotary positions and causal attention within the segments of a packed row."""

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from etude.policy.shape import PolicyShape


def inverse_frequencies(shape: PolicyShape) -> Float[Tensor, " pairs"]:
    """Return the angle per position of each rotary pair, stretched as Llama 3 does where the shape says so."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotary_table(
    frequencies: Float[Tensor, " pairs"], positions: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens 1 dim"], Float[Tensor, "tokens 1 dim"]]:
    """Return cosine and sine per token, ready to multiply heads `[tokens, heads, dim]`."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(
    heads: Float[Tensor, "tokens heads dim"],
    cosine: Float[Tensor, "tokens 1 dim"],
    sine: Float[Tensor, "tokens 1 dim"],
) -> Float[Tensor, "tokens heads dim"]:
    """Turn each head by its token's angles (Hugging Face's half-split layout)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def segment_attention(
    queries: Float[Tensor, "tokens heads dim"],
    keys: Float[Tensor, "tokens kv_heads dim"],
    values: Float[Tensor, "tokens kv_heads dim"],
    boundaries: Sequence[int],
) -> Float[Tensor, "tokens heads dim"]:
    """Return causal attention where no token sees another segment.

    `boundaries` are the segments' starts and the end of the last one: segment i is `boundaries[i]:boundaries[i + 1]`.
    """
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    grouped = queries.shape[1] != keys.shape[1]
    parts = zip(*(torch.split(x.transpose(0, 1), lengths, dim=1) for x in (queries, keys, values)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=grouped)[0]
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)
