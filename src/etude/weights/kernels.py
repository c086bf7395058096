"""The inner loops of the codec, in numpy.

`compiled.py` has the same loops for numba, `torch_kernels.py` those that look at weights for weights on a device. All
give the same bytes.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.weights.ulp import Layout, Patterns, moved

Indices = NDArray[np.int64]
NO_DIGEST = bytes(16)
"""In the place of a tile's hash: it was made where only its tensor's digest could be taken."""
_CHUNK = 1 << 16
"""Elements whose bits are unpacked at a time, so that memory does not grow with the tile."""

_Same = TypeVar("_Same")


@runtime_checkable
class Elements(Protocol):
    """Weights in a row, where they lie: an array of unsigned integers here, or what stands for one elsewhere."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self: _Same, part: slice | tuple[slice, ...], /) -> _Same: ...

    def __setitem__(self: _Same, part: slice | tuple[slice, ...], values: _Same, /) -> None: ...

    def reshape(self: _Same, *shape: int) -> _Same:
        """Return the same elements along other axes."""
        ...


T = TypeVar("T", bound=Elements)


@runtime_checkable
class Kernels(Protocol[T]):
    """What is worth compiling, and what depends on where the weights lie. Only tiles may lie elsewhere."""

    def view(self, data: T, layout: Layout) -> T:
        """Return bytes as elements in the same memory."""
        ...

    def fetch(self, tile: T) -> Patterns:
        """Return elements to be read here."""
        ...

    def take(self, tile: T, places: Indices) -> Patterns:
        """Return the elements at these places, in the shape of `places`."""
        ...

    def fill(self, tile: T, values: Patterns) -> None:
        """Replace all elements."""
        ...

    def digest(self, tile: T) -> bytes:
        """Return the xxh3-128 of a tile, or `NO_DIGEST` where it cannot be taken."""
        ...

    def changed(self, old: T, new: T) -> tuple[Indices, Patterns, Patterns]:
        """Return the ascending positions at which two tiles differ, and what is there in each."""
        ...

    def ranks(
        self, tile: T, positions: Indices, lowest: int, count: int, layout: Layout
    ) -> tuple[NDArray[np.uint8], Indices, Indices]:
        """Return class of each ascending position and rank within it, and the number of members of each class.

        Class c holds the elements of exponent `lowest` + c; the first and the last class also hold what lies beyond.
        """
        ...

    def positions(
        self, tile: T, ranks: Sequence[Indices], lowest: int, layout: Layout
    ) -> tuple[Indices, Indices] | None:
        """Return where the members with these ranks, ascending by class, are, and the number of members of each class.

        None when a class has not as many members.
        """
        ...

    def quotients(self, indices: Indices, ks: range) -> list[int]:
        """Return for every k the sum of the gaps between ascending indices, each without its k low bits."""
        ...

    def write_rice(self, indices: Indices, k: int, num_bits: int) -> bytes:
        """Return the gaps' quotients in unary, `num_bits` in all, and then the k low bits as planes."""
        ...

    def read_rice(self, data: NDArray[np.uint8], lists: Indices, size: int) -> Indices | None:
        """Return the indices of many lists, one list after the other.

        A row of `lists` has the bytes of the quotients, the number of gaps and k; planes follow their quotients in
        `data`. None unless each list has as many ones and all its indices are below `size`.
        """
        ...

    def unit_steps(self, signs: NDArray[np.uint8], count: int, layout: Layout) -> Patterns:
        """Return 1 for every bit that is set and -1 for every other one."""
        ...

    def add(self, tile: T, positions: Indices, distances: Patterns, layout: Layout) -> None:
        """Move the elements at distinct positions."""
        ...

    def write_low_bits(self, values: Patterns, bits: int) -> bytes:
        """Return the low bits of every value, the lowest first, as one bit string."""
        ...

    def read_low_bits(self, data: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint64]:
        """Return the values; `data` has exactly their size."""
        ...


class HostTiles:
    """Tiles that lie here."""

    def view(self, data: Patterns, layout: Layout) -> Patterns:
        """See `Kernels`."""
        return data.view(layout.unsigned)

    def fetch(self, tile: Patterns) -> Patterns:
        """See `Kernels`."""
        return tile

    def take(self, tile: Patterns, places: Indices) -> Patterns:
        """See `Kernels`."""
        return tile[places]

    def fill(self, tile: Patterns, values: Patterns) -> None:
        """See `Kernels`."""
        tile[:] = values

    def digest(self, tile: Patterns) -> bytes:
        """See `Kernels`."""
        return xxhash.xxh3_128_digest(tile.data)


class NumpyKernels(HostTiles):
    """Whole-array operations."""

    def changed(self, old: Patterns, new: Patterns) -> tuple[Indices, Patterns, Patterns]:
        """See `Kernels`."""
        positions = self._differing(old, new)
        return positions, old[positions], new[positions]

    def ranks(
        self, tile: Patterns, positions: Indices, lowest: int, count: int, layout: Layout
    ) -> tuple[NDArray[np.uint8], Indices, Indices]:
        """See `Kernels`."""
        classes = _classes(tile, lowest, count, layout)
        numbers = classes[positions]
        ranks = np.empty(positions.size, np.int64)
        for which in np.unique(numbers):
            chosen = np.flatnonzero(numbers == which)
            ranks[chosen] = np.searchsorted(np.flatnonzero(classes == which), positions[chosen])
        return numbers, ranks, np.bincount(classes, minlength=count)

    def positions(
        self, tile: Patterns, ranks: Sequence[Indices], lowest: int, layout: Layout
    ) -> tuple[Indices, Indices] | None:
        """See `Kernels`."""
        classes = _classes(tile, lowest, len(ranks), layout)
        members = np.bincount(classes, minlength=len(ranks))
        if any(wanted.size and wanted[-1] >= count for wanted, count in zip(ranks, members, strict=True)):
            return None
        found = [np.flatnonzero(classes == which)[wanted] for which, wanted in enumerate(ranks) if wanted.size]
        return np.concatenate([np.zeros(0, np.int64), *found]), members

    def quotients(self, indices: Indices, ks: range) -> list[int]:
        """See `Kernels`."""
        gaps = _gaps(indices)
        return [int((gaps >> k).sum()) for k in ks]

    def write_rice(self, indices: Indices, k: int, num_bits: int) -> bytes:
        """See `Kernels`."""
        gaps = _gaps(indices)
        unary = np.zeros(num_bits, np.uint8)
        unary[np.cumsum((gaps >> k) + 1) - 1] = 1
        planes = [np.packbits((gaps >> plane).astype(np.uint8) & 1) for plane in range(k)]
        return b"".join(part.tobytes() for part in (np.packbits(unary), *planes))

    def read_rice(self, data: NDArray[np.uint8], lists: Indices, size: int) -> Indices | None:
        """See `Kernels`."""
        found = [np.zeros(0, np.int64)]
        begin = 0
        for num_unary, count, k in lists.tolist():
            ends = np.flatnonzero(np.unpackbits(data[begin : begin + num_unary]))
            begin += num_unary
            if ends.size != count:
                return None
            gaps = np.diff(ends, prepend=-1) - 1
            gaps <<= k
            for plane in range(k):
                row = data[begin : begin + (count + 7) // 8]
                begin += row.size
                gaps |= np.unpackbits(row, count=count).astype(np.int64) << plane
            if count and int(gaps.max()) >= size:  # first, so that the sum cannot overflow
                return None
            found.append(np.cumsum(gaps + 1) - 1)
            if count and int(found[-1][-1]) >= size:
                return None
        return np.concatenate(found)

    def unit_steps(self, signs: NDArray[np.uint8], count: int, layout: Layout) -> Patterns:
        """See `Kernels`."""
        positive = np.unpackbits(signs, count=count).astype(layout.unsigned)
        return positive + positive - layout.unsigned.type(1)

    def add(self, tile: Patterns, positions: Indices, distances: Patterns, layout: Layout) -> None:
        """See `Kernels`."""
        tile[positions] = moved(tile[positions], distances, layout)

    def write_low_bits(self, values: Patterns, bits: int) -> bytes:
        """See `Kernels`."""
        shifts = np.arange(bits, dtype=values.dtype)
        chunks = (values[begin : begin + _CHUNK] for begin in range(0, values.size, _CHUNK))
        return b"".join(np.packbits((chunk[:, None] >> shifts).astype(np.uint8) & 1).tobytes() for chunk in chunks)

    def read_low_bits(self, data: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint64]:
        """See `Kernels`."""
        values = np.zeros(count, np.uint64)
        for begin in range(0, count, _CHUNK):
            chunk = values[begin : begin + _CHUNK]
            first = begin * bits // 8
            unpacked = np.unpackbits(data[first:], count=chunk.size * bits).reshape(chunk.size, bits)
            for place in range(bits):
                chunk |= unpacked[:, place].astype(np.uint64) << np.uint64(place)
        return values

    def _differing(self, old: Patterns, new: Patterns) -> Indices:
        per_word = 8 // old.dtype.itemsize
        if per_word <= 2:  # noqa: PLR2004 - nothing to win
            return np.flatnonzero(old != new)
        whole = old.size - old.size % per_word
        # Eight bytes at a time first: most words did not change.
        words = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
        differs = old[:whole].reshape(-1, per_word)[words] != new[:whole].reshape(-1, per_word)[words]
        found = np.flatnonzero(differs)
        tail = np.flatnonzero(old[whole:] != new[whole:]) + whole
        return np.concatenate((words[found // per_word] * per_word + found % per_word, tail))


def _gaps(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def _classes(tile: Patterns, lowest: int, count: int, layout: Layout) -> NDArray[np.uint8]:
    exponents = 1 << layout.exponent_bits
    table = np.clip(np.arange(exponents) - lowest, 0, count - 1).astype(np.uint8)
    return table[(tile >> layout.mantissa_bits) & (exponents - 1)]
