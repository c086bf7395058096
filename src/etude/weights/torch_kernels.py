"""What the codec does to weights, for weights on a device: what changed moves between it and here, and nothing else.

A device's integers are signed, which changes neither sums nor bits. What must hold of an object's bytes is found out
here, before anything is sent.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.weights.compiled import fastest_kernels
from etude.weights.kernels import NO_DIGEST, Indices
from etude.weights.ulp import Layout, Patterns

_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchKernels:
    """See `Kernels`. Tiles are tensors of signed integers, all on one device."""

    def __init__(self, num_elements: int) -> None:
        """Prepare for that many elements."""
        host = fastest_kernels(num_elements)
        self.quotients = host.quotients
        self.write_rice = host.write_rice
        self.read_rice = host.read_rice
        self.unit_steps = host.unit_steps
        self.write_low_bits = host.write_low_bits
        self.read_low_bits = host.read_low_bits

    def view(self, data: Tensor, layout: Layout) -> Tensor:
        """See `Kernels`."""
        # An empty tensor may have strides that no view of another width allows.
        return data.view(_SIGNED[layout.width]) if len(data) else data.new_empty(0, dtype=_SIGNED[layout.width])

    def fetch(self, tile: Tensor) -> Patterns:
        """See `Kernels`."""
        return _fetched(tile)

    def take(self, tile: Tensor, places: Indices) -> Patterns:
        """See `Kernels`."""
        return _fetched(tile[_sent(places, tile)])

    def fill(self, tile: Tensor, values: Patterns) -> None:
        """See `Kernels`."""
        tile.copy_(_sent(values, tile).view(tile.dtype))

    def digest(self, tile: Tensor) -> bytes:
        """See `Kernels`: hashing bytes one after the other is nothing for a device."""
        del tile
        return NO_DIGEST

    def changed(self, old: Tensor, new: Tensor) -> tuple[Indices, Patterns, Patterns]:
        """See `Kernels`."""
        positions = (old != new).nonzero().reshape(-1)
        return positions.cpu().numpy(), _fetched(old[positions]), _fetched(new[positions])

    def ranks(
        self, tile: Tensor, positions: Indices, lowest: int, count: int, layout: Layout
    ) -> tuple[NDArray[np.uint8], Indices, Indices]:
        """See `Kernels`."""
        order, classes, begins = _by_class(tile, lowest, count, layout)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=tile.device)
        where = _sent(positions, tile)
        numbers = classes[where]
        ranks = places[where] - begins[numbers.long()]
        return numbers.cpu().numpy(), ranks.cpu().numpy(), begins.diff().cpu().numpy()

    def positions(
        self, tile: Tensor, ranks: Sequence[Indices], lowest: int, layout: Layout
    ) -> tuple[Indices, Indices] | None:
        """See `Kernels`."""
        order, _, begins = _by_class(tile, lowest, len(ranks), layout)
        starts = begins.cpu().numpy()
        members = np.diff(starts)
        if any(wanted.size and wanted[-1] >= number for wanted, number in zip(ranks, members, strict=True)):
            return None
        places = np.concatenate([wanted + start for wanted, start in zip(ranks, starts[:-1], strict=True)])
        return order[_sent(places, tile)].cpu().numpy(), members

    def add(self, tile: Tensor, positions: Indices, distances: Patterns, layout: Layout) -> None:
        """See `Kernels`."""
        where = _sent(positions, tile)
        keys = _key(tile[where], layout) + _sent(distances, tile)
        # A key that is not below zero was a pattern with its sign set: the same exchange, of the complement.
        tile[where] = keys ^ _flips(~keys, layout) if layout.exponent_bits else keys


def _by_class(tile: Tensor, lowest: int, count: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return all places class by class, the class of each element, and where each class begins, and the last one ends.

    The exponent is below the sign, so that what a shift to the right copies from there is masked.
    """
    exponents = (tile >> layout.mantissa_bits) & ((1 << layout.exponent_bits) - 1)
    classes = (exponents - lowest).clamp_(0, count - 1).to(torch.uint8)
    ordered, order = classes.sort(stable=True)
    numbers = torch.arange(count + 1, dtype=torch.uint8, device=tile.device)
    return order, classes, torch.searchsorted(ordered, numbers)


def _key(patterns: Tensor, layout: Layout) -> Tensor:
    return patterns ^ _flips(patterns, layout) if layout.exponent_bits else patterns


def _flips(patterns: Tensor, layout: Layout) -> Tensor:
    """All bits where the sign is set, else the sign alone."""
    return (patterns >> (layout.bits - 1)) | torch.iinfo(patterns.dtype).min


def _sent(array: NDArray[np.generic], tile: Tensor) -> Tensor:
    """Return a copy where the tile lies: indices as they are, elements as the signed integers of their bits."""
    signed = array.view(f"<i{array.itemsize}")
    return torch.tensor(signed, device=tile.device)


def _fetched(elements: Tensor) -> Patterns:
    array = elements.cpu().numpy()
    return array.view(f"<u{array.itemsize}")
