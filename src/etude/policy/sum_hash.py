"""A hash of a tensor that does not depend on how the tensor is divided, and follows changes at the cost of the changes.

Bytes are read as units: two bytes, little-endian, or one where the dtype has one. Each unit is mixed with its place in
the whole tensor into two numbers of 64 bits, and the numbers are added modulo 2^64. So parts may be hashed wherever
they lie and added up, and a changed unit is one number taken away and one put in. Made against accidents, not against
forgers: what is fetched has a sha256 of its own.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

MODULUS = 1 << 64
_CHUNK = 1 << 14
"""Units at a time: their intermediate results stay in the second-level cache."""
_COMPARED = 1 << 17
"""Units that are compared at a time."""
_WORTH_COMPILING = 1 << 21
"""Units from which on loading the compiler's work is paid back."""
_WORTH_CALLING = 1 << 14
"""Units from which on the compiler's work is faster, once it is loaded."""
STEP = np.uint64(0x9E3779B97F4A7C15)
SHARED = np.uint64(0xBF58476D1CE4E5B9)
FIRST = np.uint64(0x94D049BB133111EB)
SECOND = np.uint64(0xC4CEB9FE1A85EC53)
_BITS_16, _BITS_27, _BITS_29, _BITS_30, _BITS_31, _BITS_33 = (np.uint64(bits) for bits in (16, 27, 29, 30, 31, 33))


class Sums(NamedTuple):
    """The two sums of some units of a tensor; those of an empty set are 0."""

    first: int = 0
    second: int = 0

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums of both sets of units."""
        return Sums((self.first + other.first) % MODULUS, (self.second + other.second) % MODULUS)

    def minus(self, other: "Sums") -> "Sums":
        """Return the sums without the units of the other set."""
        return Sums((self.first - other.first) % MODULUS, (self.second - other.second) % MODULUS)

    def hex(self) -> str:
        """Return both as 32 digits: the tensor's digest, once all its units are in."""
        return f"{self.first:016x}{self.second:016x}"


def from_hex(digest: str) -> Sums:
    """Return the sums that `Sums.hex` wrote."""
    return Sums(int(digest[:16], 16), int(digest[16:], 16))


def unit_bytes(width: int) -> int:
    """Return how many bytes a unit has where an element has `width`."""
    return min(width, 2)


def sums_of(data: Bytes, *, width: int, begin: int = 0) -> Sums:
    """Return the sums of the bytes of neighbouring elements of `width` bytes, the first of which is element `begin`."""
    units = _units(data, width)
    return sums_of_runs(data, width=width, begins=np.array([begin], np.uint64), run=units.size // _per_element(width))


def sums_of_runs(data: Bytes, *, width: int, begins: Words, run: int) -> Sums:
    """Return the sums of runs of `run` elements that lie in `data` one after the other.

    `begins` says for every run which element of the tensor is its first.
    """
    units = _units(data, width)
    starts, length = begins * np.uint64(_per_element(width)), run * _per_element(width)
    if not units.size:
        return Sums()
    if units.size >= (_WORTH_CALLING if _compiled.cache_info().currsize else _WORTH_COMPILING) and _has_compiler():
        sums = np.zeros(2, np.uint64)
        _compiled(units.dtype.name)(units, starts, length, sums)
        return Sums(int(sums[0]), int(sums[1]))
    total = Sums()
    if length >= _CHUNK:
        for index, start in enumerate(starts.tolist()):
            row = units[index * length : (index + 1) * length]
            for at in range(0, length, _CHUNK):
                part = row[at : at + _CHUNK]
                total = total.plus(_mixed(part, np.arange(start + at, start + at + part.size, dtype=np.uint64)))
        return total
    rows = max(1, _CHUNK // length)
    within = np.arange(length, dtype=np.uint64)
    for at in range(0, starts.size, rows):
        places = (starts[at : at + rows, None] + within).reshape(-1)
        total = total.plus(_mixed(units[at * length : at * length + places.size], places))
    return total


def sums_of_changed_runs(old: Bytes, new: Bytes, *, width: int, begins: Words, run: int) -> Sums:
    """Return what runs as in `sums_of_runs` add to the sums when they change; costs what comparing them costs."""
    before, after = _units(old, width), _units(new, width)
    starts, length = begins * np.uint64(_per_element(width)), np.uint64(run * _per_element(width))
    total = Sums()
    for at in range(0, before.size, _COMPARED):
        was, becomes = before[at : at + _COMPARED], after[at : at + _COMPARED]
        (where,) = np.nonzero(was != becomes)
        if where.size:
            rows, within = np.divmod(where.astype(np.uint64) + np.uint64(at), length)
            places = starts[rows] + within
            total = total.plus(_mixed(becomes[where], places)).minus(_mixed(was[where], places))
    return total


@functools.cache
def _has_compiler() -> bool:
    return importlib.util.find_spec("numba") is not None


def _per_element(width: int) -> int:
    return width // unit_bytes(width)


def _units(data: Bytes, width: int) -> NDArray[np.unsignedinteger[Any]]:
    return np.require(data.view(f"<u{unit_bytes(width)}"), requirements=("C", "A"))


def _mixed(units: NDArray[np.unsignedinteger[Any]], places: Words) -> Sums:
    """Both mixers share their first round; the first of them is SplitMix64's."""
    mixed = units.astype(np.uint64)
    mixed |= places << _BITS_16
    mixed += STEP
    mixed ^= mixed >> _BITS_30
    mixed *= SHARED
    other = mixed >> _BITS_33
    other ^= mixed
    other *= SECOND
    other ^= other >> _BITS_29
    mixed ^= mixed >> _BITS_27
    mixed *= FIRST
    mixed ^= mixed >> _BITS_31
    return Sums(int(mixed.sum()), int(other.sum()))


def _add_runs(
    units: NDArray[np.unsignedinteger[Any]], starts: Words, length: int, sums: Words
) -> None:  # pragma: no cover - compiled
    first, second = np.uint64(0), np.uint64(0)
    for row in range(starts.size):
        start, at = starts[row], row * length
        for column in range(length):
            mixed = ((start + np.uint64(column)) << _BITS_16 | np.uint64(units[at + column])) + STEP
            mixed = (mixed ^ (mixed >> _BITS_30)) * SHARED
            other = (mixed ^ (mixed >> _BITS_33)) * SECOND
            second += other ^ (other >> _BITS_29)
            mixed = (mixed ^ (mixed >> _BITS_27)) * FIRST
            first += mixed ^ (mixed >> _BITS_31)
    sums[0], sums[1] = first, second


@functools.cache
def _compiled(unit: str) -> Callable[..., None]:
    import numba  # noqa: PLC0415 - an extra; costs half a second that only hashing large tensors need pay

    signature = f"void(Array({unit}, 1, 'C', readonly=True), Array(uint64, 1, 'C', readonly=True), int64, uint64[::1])"
    compiled = cast("Callable[..., Callable[..., None]]", numba.njit([signature], cache=True, nogil=True))
    # Unwrapped: the tests put type checks around every function, which no compiler understands.
    return compiled(inspect.unwrap(_add_runs))
