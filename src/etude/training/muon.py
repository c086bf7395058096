"""Muon: gradient descent whose updates are orthogonalised, about three times fewer tokens than AdamW from nothing.

`torch.optim.Muon` takes matrices only; the experts of a layer are a stack of them. The iteration is Newton-Schulz of
Jordan et al. (2024), the scale that of Moonlight (arXiv 2502.16982): updates as large as AdamW's.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
_RMS = 0.2


class Muon:
    """Updates matrices and stacks of matrices in place."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, momentum: float = 0.95) -> None:
        self._parameters = list(parameters)
        self._momentum = momentum
        self._averages = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient, and clear the gradients."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            if parameter.grad is None:
                continue
            average.lerp_(parameter.grad, 1.0 - self._momentum)
            update = orthogonalised(parameter.grad.lerp(average, self._momentum))
            parameter.add_(update, alpha=-lr * _RMS * max(parameter.shape[-2:]) ** 0.5)
            parameter.grad = None


def orthogonalised(matrices: Float[Tensor, "*stack rows columns"]) -> Float[Tensor, "*stack rows columns"]:
    """Return the nearest matrices whose singular values are all about 1 (between 0.7 and 1.2)."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.transpose(-2, -1) if tall else matrices
    wide = wide / (wide.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.transpose(-2, -1)
        wide = _A * wide + (_B * gram + _C * (gram @ gram)) @ wide
    return wide.transpose(-2, -1) if tall else wide
