"""Torch tensors as flat bytes and back."""

from collections.abc import Mapping
from typing import Generic

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import PolicyError
from etude.weights.kernels import T

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names as in safetensors. As in torch, an element of `F4` is two codes in a byte."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Flat(msgspec.Struct, Generic[T], frozen=True, kw_only=True, eq=False):
    """A tensor as its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: T
    """Little-endian, contiguous, one-dimensional."""


FlatTensor = Flat[NDArray[np.uint8]]
"""One on the CPU."""


def snapshot(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, FlatTensor]:
    """Return copies that later optimizer steps do not touch, sorted by name; floating point is rounded to `dtype`.

    Raise `PolicyError` for a tensor that has no bytes, or of a dtype without a name.
    """
    copies: dict[str, FlatTensor] = {}
    for name in sorted(tensors):
        try:
            copies[name] = _snapshot(tensors[name], dtype)
        except (ValueError, NotImplementedError) as error:
            msg = f"tensor {name!r} cannot be published: {error}"
            raise PolicyError(msg) from error
    return copies


def _snapshot(tensor: Tensor, dtype: torch.dtype) -> FlatTensor:
    target = dtype if tensor.is_floating_point() else tensor.dtype
    copy = torch.empty(tensor.shape, dtype=target)
    return flatten(copy.copy_(tensor.detach()))


def flatten(tensor: Tensor) -> FlatTensor:
    """Return the bytes of a tensor, sharing its memory where it is contiguous on the CPU.

    Raise `ValueError` for a dtype that safetensors has no name for.
    """
    if tensor.dtype not in _NAMES:
        msg = f"tensors of {tensor.dtype} cannot be published; convert to one of {', '.join(DTYPES)}"
        raise ValueError(msg)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # An empty tensor may have strides that no view as bytes allows.
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return FlatTensor(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def unflatten(flat: FlatTensor) -> Tensor:
    """Return the tensor; it shares the bytes' memory."""
    if not flat.data.size:
        return torch.empty(flat.shape, dtype=DTYPES[flat.dtype])
    return torch.from_numpy(flat.data).view(DTYPES[flat.dtype]).reshape(flat.shape)  # pyright: ignore[reportUnknownMemberType]
