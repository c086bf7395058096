"""Precisions in which a fleet holds the same policy version."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from etude.errors import PolicyError
from etude.policy.quantise import (
    FP8_BLOCKS,
    FP8_ROWS,
    INT4_GROUPS,
    INT8_ROWS,
    CodeFormat,
    are_codes,
    dequantise,
    fits,
    quantise,
    recode,
)

View = Literal["fp32", "bf16", "fp8", "fp8_block", "int8", "int4"]

FORMATS: dict[View, CodeFormat] = {
    "fp8": FP8_ROWS,
    "fp8_block": FP8_BLOCKS,
    "int8": INT8_ROWS,
    "int4": INT4_GROUPS,
}
"""Views that hold the linear layers as codes."""
SCALES = "_scale"
"""What follows the name of a tensor of codes in the name of its scales."""


def view_dtype(view: View) -> torch.dtype:
    """Return the dtype in which the embedded engine multiplies the weights of a view."""
    return torch.bfloat16 if view == "bf16" else torch.float32


def in_view(tensors: Mapping[str, Tensor], view: View) -> dict[str, Tensor]:
    """Return what a fleet of this view holds of a version; the same input gives the same bits everywhere.

    Names are Hugging Face's. Views of codes hold the linear layers only as codes, under the layer's name, beside their
    scales, under that name and `_scale`; embeddings, norms, biases, routers and the language-model head stay as they
    were published, as in quantised deployments. Tensors that are in the view already stay as they are.
    """
    if view not in FORMATS:
        return {name: tensor.to(view_dtype(view)) for name, tensor in tensors.items()}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        held[name] = tensor
        if is_coded(name, tensor, view) and name + SCALES not in tensors:
            held[name], held[name + SCALES] = quantise(tensor, FORMATS[view])
    return held


def out_of_view(held: Mapping[str, Tensor], view: View) -> dict[str, Tensor]:
    """Return the weights that a fleet of this view multiplies with, from what `in_view` returned.

    Raise `PolicyError` when codes and scales do not fit each other, or one of them is missing.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in held.items():
        scales = held.get(name + SCALES) if view in FORMATS else None
        if scales is not None and are_codes(tensor, scales, FORMATS[view]):
            weights[name] = dequantise(tensor, scales, FORMATS[view])
        elif scales is not None or is_coded(name, tensor, view):
            msg = f"{name} is not codes with their scales, as view {view} has them; derive the view's chain anew"
            raise PolicyError(msg)
        elif name.removesuffix(SCALES) == name or name.removesuffix(SCALES) not in held:
            weights[name] = tensor.to(view_dtype(view))
    return weights


class ViewRecord(NamedTuple):
    """What it takes, beside the weights in use, to say again what is held: a fraction of a percent of it."""

    view: View
    scales: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    """Of the tensors that are held as they were published."""

    @classmethod
    def of(cls, held: Mapping[str, Tensor], view: View) -> "ViewRecord":
        """Return the record of what `in_view` returned."""
        scales = {name + SCALES: held[name + SCALES].clone() for name in held if name + SCALES in held}
        return cls(view, scales, {name: tensor.dtype for name, tensor in held.items() if name not in scales})

    def held(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the weights in use stand for, which is what they came from unless they were damaged since.

        Weights that codes or the published precision cannot stand for are returned as they are.
        """
        held: dict[str, Tensor] = dict(self.scales)
        for name, tensor in weights.items():
            scales = self.scales.get(name + SCALES)
            if scales is None:
                found = tensor.to(self.dtypes.get(name, tensor.dtype))
                again = found.to(tensor.dtype)
            else:
                found = recode(tensor, scales, FORMATS[self.view])
                again = dequantise(found, scales, FORMATS[self.view])
            held[name] = found if _same_bits(again, tensor) else tensor
        return held


def is_coded(name: str, tensor: Tensor, view: View) -> bool:
    """Return whether a view holds the published tensor of this name as codes."""
    return view in FORMATS and name.endswith("_proj.weight") and fits(tensor, FORMATS[view])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike `torch.equal`, this holds for a NaN and itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
