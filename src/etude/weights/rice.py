"""Golomb-Rice codes of gaps: quotients in unary, low bits in planes, so that both sides work on whole arrays."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.errors import IntegrityError
from etude.weights.bits import require
from etude.weights.kernels import Indices, Kernels

_HEADER = struct.Struct("<BII")
_MAX_K = 22
EMPTY = b"\0"


def write_gaps(indices: Indices, kernels: Kernels[Any]) -> bytes:
    """Return ascending indices as the distances between them."""
    if not indices.size:
        return EMPTY
    count = indices.size
    mean = (int(indices[-1]) + 1 - count) / count
    guess = max(0, math.floor(math.log2(0.6931 * (mean + 1)) + 0.5)) if mean else 0
    # The best for gaps of a geometric distribution, or a neighbour that needs fewer bits for these.
    ks = range(max(0, guess - 1), guess + 2)
    quotients = dict(zip(ks, kernels.quotients(indices, ks), strict=True))
    k = min(quotients, key=lambda k: count * (1 + k) + quotients[k])
    num_bits = count + quotients[k]
    return _HEADER.pack(k + 1, count, num_bits) + kernels.write_rice(indices, k, num_bits)


def read_gaps(data: memoryview, size: int, kernels: Kernels[Any]) -> Indices:
    """Return ascending indices below `size`; see `read_gap_lists`."""
    return read_gap_lists([data], size, kernels)[0]


def read_gap_lists(lists: Sequence[memoryview], size: int, kernels: Kernels[Any]) -> list[Indices]:
    """Return the ascending indices below `size` of each list, of which all together have no more than `size`.

    Everything else is refused before memory for more than these is taken. Many lists at once, because calls cost more
    than what is in a short one.
    """
    rows: list[tuple[int, int, int]] = []
    bodies: list[memoryview] = []
    left = size
    for data in lists:
        count, k, num_unary = _read_header(data, left)
        left -= count
        rows.append((num_unary, count, k))
        bodies.append(data[_HEADER.size if count else len(data) :])
    table = np.array(rows, np.int64).reshape(-1, 3)
    indices = kernels.read_rice(np.frombuffer(b"".join(bodies), np.uint8), table, size)
    if indices is None:
        msg = f"{size - left} gaps are not as many, or lead out of {size} elements"
        raise IntegrityError(msg)
    ends = np.cumsum(table[:, 1]).tolist()
    return [indices[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _read_header(data: memoryview, most: int) -> tuple[int, int, int]:
    """Return how many gaps a list has, its parameter and the bytes of its quotients; refuse what no writer writes."""
    if bytes(data[:2]) == EMPTY:
        return 0, 0, 0
    require(len(data) > _HEADER.size, "a list of gaps ends within its header")
    above, count, num_bits = _HEADER.unpack_from(data)
    k = above - 1
    require(0 <= k <= _MAX_K, f"a Rice parameter of {k}")
    require(0 < count <= most, f"{count} changes of {most} elements")
    require(count <= num_bits <= count + (most >> k), f"{num_bits} unary bits for {count} gaps")
    num_unary, row = (num_bits + 7) // 8, (count + 7) // 8
    require(len(data) == _HEADER.size + num_unary + k * row, "a list of gaps has another length than its header says")
    unary, planes = data[_HEADER.size : _HEADER.size + num_unary], data[_HEADER.size + num_unary :]
    last = (num_bits - 1) % 8
    require(unary[-1] & (0xFF >> last) == 0x80 >> last, "a unary string does not end with a one")
    if count % 8:
        padding = 0xFF >> count % 8
        require(not any(byte & padding for byte in bytes(planes[row - 1 :: row])), "the padding of a plane is not zero")
    return count, k, num_unary
