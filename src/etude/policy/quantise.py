"""Weights as codes with scales. The same weights give the same bits on every machine, in every thread and chunk.

Each step is one that IEEE 754 fixes: the largest magnitude of a block, a division, a rounding to nearest even. Nothing
is summed, so no order matters, and nothing is multiplied by a reciprocal.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor
from torch.nn import functional

_CHUNK = 1 << 18
"""Weights that are turned into codes together: what bounds the memory for intermediate results."""
_TINY = torch.finfo(torch.float32).tiny
"""Scales are never subnormal: such a one may round to 0, and some processors take it for 0."""
_NIBBLE = 16
_NEGATIVE_NIBBLE = 8


class CodeFormat(NamedTuple):
    """How a matrix is written as codes: `weight = code * scale of its block`."""

    codes: torch.dtype
    largest: float
    """Code of a block's largest magnitude, so that none saturates."""
    rows: int
    """Of a block."""
    columns: int | None
    """Of a block; None for all."""
    scales: torch.dtype = torch.float32
    packed: bool = False
    """Two codes to a byte, the one of the lower column in the lower half, as 4-bit two's complement."""


FP8_ROWS = CodeFormat(torch.float8_e4m3fn, 448.0, 1, None)
FP8_BLOCKS = CodeFormat(torch.float8_e4m3fn, 448.0, 128, 128)
INT8_ROWS = CodeFormat(torch.int8, 127.0, 1, None)
INT4_GROUPS = CodeFormat(torch.uint8, 7.0, 1, 32, torch.bfloat16, packed=True)


def fits(weights: Tensor, code_format: CodeFormat) -> bool:
    """Return whether this can be written in a format: a matrix, of an even width where codes are packed."""
    return weights.ndim == 2 and bool(weights.numel()) and not (code_format.packed and weights.shape[1] % 2)  # noqa: PLR2004


def quantise(weights: Float[Tensor, "rows columns"], code_format: CodeFormat) -> tuple[Tensor, Tensor]:
    """Return codes and the scales of their blocks.

    A block with a number that is not finite has the scale NaN and codes 0.
    """
    scales = _scales(weights, code_format)
    return recode(weights, scales, code_format), scales


def are_codes(codes: Tensor, scales: Tensor, code_format: CodeFormat) -> bool:
    """Return whether these are codes and scales of a matrix, by their dtypes and shapes."""
    if (codes.dtype, scales.dtype, codes.ndim) != (code_format.codes, code_format.scales, 2):
        return False
    rows, columns = codes.shape[0], codes.shape[1] * (2 if code_format.packed else 1)
    return scales.shape == (-(-rows // code_format.rows), -(-columns // (code_format.columns or max(1, columns))))


def recode(weights: Float[Tensor, "rows columns"], scales: Tensor, code_format: CodeFormat) -> Tensor:
    """Return the codes of weights under given scales; of what `dequantise` returned, the codes it was given."""
    blocks = _blocks_at_once(weights, code_format)
    parts = zip(_split(weights, blocks * code_format.rows), _split(scales, blocks), strict=True)
    return torch.cat([_codes(part, own, code_format) for part, own in parts])


def dequantise(codes: Tensor, scales: Tensor, code_format: CodeFormat) -> Float[Tensor, "rows columns"]:
    """Return the weights that codes stand for, in float32."""
    numbers = (_unpacked(codes) if code_format.packed else codes).float()
    return numbers * _spread(scales.float(), numbers, code_format)


def _blocks_at_once(weights: Tensor, code_format: CodeFormat) -> int:
    return max(1, _CHUNK // (weights.shape[1] * code_format.rows))


def _split(tensor: Tensor, rows: int) -> list[Tensor]:
    return [tensor[begin : begin + rows] for begin in range(0, len(tensor), rows)]


def _scales(weights: Tensor, code_format: CodeFormat) -> Tensor:
    rows = _blocks_at_once(weights, code_format) * code_format.rows
    largest = torch.cat([_largest(part, code_format) for part in _split(weights, rows)])
    # By a number that lies elsewhere a GPU does not divide: it multiplies by its reciprocal.
    scales = (largest / largest.new_full((), code_format.largest)).clamp(min=_TINY)
    # Which NaN an operation makes differs between processors.
    scales = torch.where(torch.isfinite(largest), scales, torch.full_like(scales, torch.nan))
    return scales.to(code_format.scales)


def _largest(weights: Tensor, code_format: CodeFormat) -> Float[Tensor, "blocks_down blocks_across"]:
    height, width = code_format.rows, code_format.columns or weights.shape[1]
    padded = functional.pad(weights.abs().float(), (0, -weights.shape[1] % width, 0, -len(weights) % height))
    return padded.reshape(len(padded) // height, height, -1, width).amax(dim=(1, 3))


def _codes(weights: Tensor, scales: Tensor, code_format: CodeFormat) -> Tensor:
    spread = _spread(scales.float(), weights, code_format)
    numbers = weights.float() / spread
    numbers = torch.where(spread.isnan(), 0.0, numbers).clamp(-code_format.largest, code_format.largest)
    if code_format.codes.is_floating_point:
        return numbers.to(code_format.codes)
    whole = numbers.round().to(torch.int8)
    return _packed(whole) if code_format.packed else whole


def _spread(scales: Tensor, weights: Tensor, code_format: CodeFormat) -> Tensor:
    """Return a scale for every weight."""
    rows, columns = weights.shape
    if code_format.columns is None and code_format.rows == 1:
        return scales
    tall = scales.repeat_interleave(code_format.rows, dim=0)[:rows]
    return tall.repeat_interleave(code_format.columns or columns, dim=1)[:, :columns]


def _packed(codes: Int8[Tensor, "rows columns"]) -> UInt8[Tensor, "rows half"]:
    halves = codes.view(torch.uint8) % _NIBBLE
    return halves[:, 0::2] + halves[:, 1::2] * _NIBBLE


def _unpacked(codes: UInt8[Tensor, "rows half"]) -> Int8[Tensor, "rows columns"]:
    halves = torch.stack((codes % _NIBBLE, codes // _NIBBLE), dim=2).flatten(1).to(torch.int8)
    return torch.where(halves >= _NEGATIVE_NIBBLE, halves - _NIBBLE, halves)
