"""Weights as integers in the order of the values they stand for, so that a small step is a small number."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Patterns = NDArray[np.unsignedinteger[Any]]
"""Elements as the unsigned integers of their bits. Compared as such: NaN payloads and both zeros are just numbers."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How the bits of an element are read."""

    width: int
    """Bytes of one element."""
    exponent_bits: int = 0
    """0 for integers: two's complement, unsigned, or codes packed into bytes."""
    mantissa_bits: int = 0

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 8 * self.width

    @property
    def unsigned(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The type that holds one element's bits."""
        return np.dtype(f"<u{self.width}")

    def view(self, data: NDArray[np.uint8]) -> Patterns:
        """Return bytes as elements, without a copy where the memory is aligned."""
        return np.require(data.view(self.unsigned), requirements=("C", "A"))


LAYOUTS = {
    "F64": Layout(width=8, exponent_bits=11, mantissa_bits=52),
    "F32": Layout(width=4, exponent_bits=8, mantissa_bits=23),
    "F16": Layout(width=2, exponent_bits=5, mantissa_bits=10),
    "BF16": Layout(width=2, exponent_bits=8, mantissa_bits=7),
    "F8_E4M3": Layout(width=1, exponent_bits=4, mantissa_bits=3),
    "F8_E5M2": Layout(width=1, exponent_bits=5, mantissa_bits=2),
    "F8_E8M0": Layout(width=1),
    "F4": Layout(width=1),
    "I64": Layout(width=8),
    "I32": Layout(width=4),
    "I16": Layout(width=2),
    "I8": Layout(width=1),
    "U8": Layout(width=1),
    "BOOL": Layout(width=1),
}
"""By the name of the dtype in safetensors. `F4` is two codes to a byte, `F8_E8M0` a bare exponent."""


def steps(old: Patterns, new: Patterns, layout: Layout) -> Patterns:
    """Return how far each element moved, in units of the last place, modulo 2^bits; 0 only where the bits agree."""
    return _key(new, layout) - _key(old, layout)


def moved(old: Patterns, by: Patterns, layout: Layout) -> Patterns:
    """Return the elements that `steps` away from the old ones."""
    return _unkey(_key(old, layout) + by, layout)


def magnitudes(distances: Patterns, layout: Layout) -> Patterns:
    """Return the absolute values of distances modulo 2^bits, which are below zero when their top bit is set."""
    return np.where(is_negative(distances, layout), np.negative(distances), distances)


def is_negative(distances: Patterns, layout: Layout) -> NDArray[np.bool_]:
    """Return which distances are below zero."""
    return distances >= layout.unsigned.type(1 << (layout.bits - 1))


def _key(patterns: Patterns, layout: Layout) -> Patterns:
    """-NaN < -inf < -1 < -0 < +0 < 1 < inf < NaN; differences of integers are those of their patterns already."""
    return patterns ^ _flips(patterns, layout) if layout.exponent_bits else patterns


def _unkey(keys: Patterns, layout: Layout) -> Patterns:
    return keys ^ _flips(~keys, layout) if layout.exponent_bits else keys


def _flips(patterns: Patterns, layout: Layout) -> Patterns:
    """All bits where the sign is set, else the sign alone."""
    signs = (patterns.view(f"<i{layout.width}") >> (layout.bits - 1)).view(layout.unsigned)
    return signs | layout.unsigned.type(1 << (layout.bits - 1))
