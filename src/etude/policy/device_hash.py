"""The hash of `sum_hash` for weights that lie on a device, taken there: two numbers come back.

Torch has no unsigned integers of 64 bits to speak of. Sums and products modulo 2^64 are those of signed ones; a shift
to the right copies the sign, which is masked.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from etude.policy.sum_hash import FIRST, MODULUS, SECOND, SHARED, STEP, Sums, unit_bytes

_CHUNK: Final = 1 << 20
"""Units at a time: four intermediate results of 8 MiB, whatever the tensor's size."""


def device_sums(data: Tensor, *, width: int, begins: Sequence[int] = (0,)) -> Sums:
    """Return the sums of bytes in runs of equal length, which lie in `data` one after the other.

    Args:
        data: A flat tensor of the bytes, which begins where an element may.
        width: Bytes of an element.
        begins: For every run the element of the whole tensor that is its first.
    """
    if not len(data):
        return Sums()
    unit = unit_bytes(width)
    units = data.view(torch.int16) if unit > 1 else data
    length = len(units) // len(begins)
    totals = torch.zeros(2, dtype=torch.int64, device=data.device)
    starts = torch.tensor(begins, dtype=torch.int64, device=data.device) * (width // unit)
    for at in range(0, len(units), _CHUNK):
        part = units[at : at + _CHUNK]
        places = torch.arange(at, at + len(part), device=data.device)
        if len(begins) == 1:
            places += starts
        else:
            places = starts[places // length] + places % length
        totals += _mixed(part, places, (1 << 8 * unit) - 1)
    return Sums(int(totals[0]) % MODULUS, int(totals[1]) % MODULUS)


def _mixed(units: Tensor, places: Tensor, mask: int) -> Tensor:
    mixed = (places << 16) | (units.long() & mask)
    mixed += _signed(STEP)
    mixed ^= _shifted(mixed, 30)
    mixed *= _signed(SHARED)
    other = mixed ^ _shifted(mixed, 33)
    other *= _signed(SECOND)
    other ^= _shifted(other, 29)
    mixed ^= _shifted(mixed, 27)
    mixed *= _signed(FIRST)
    mixed ^= _shifted(mixed, 31)
    return torch.stack((mixed.sum(), other.sum()))


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    shifted = numbers >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted


def _signed(constant: np.uint64) -> int:
    return int(constant.astype(np.int64))
