"""Tensors' bytes to the bytes that travel, and back, bit for bit.

`rice_ulp` codes what changed and can be read without the base; `exp_ctx` is smaller and cannot; `plane_zstd` stands
alone; `raw` is the bytes themselves. Where most weights changed, both differences fall back to whatever is smallest.
"""

from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from etude.errors import IntegrityError
from etude.weights.bits import require
from etude.weights.compiled import fastest_kernels
from etude.weights.delta import Coding
from etude.weights.kernels import NO_DIGEST, Elements, Kernels
from etude.weights.tiles import apply_tiles, read_tiles, write_tiles
from etude.weights.ulp import LAYOUTS, Layout

Encoding = Literal["raw", "plane_zstd", "rice_ulp", "exp_ctx"]
Difference = Literal["rice_ulp", "exp_ctx"]

RAW: Final = "raw"
PLANE_ZSTD: Final = "plane_zstd"
RICE_ULP: Final = "rice_ulp"
EXP_CTX: Final = "exp_ctx"

_ALONE = frozenset({Coding.RAW, Coding.PLANES})
_WITHOUT_CONTEXT = _ALONE | {Coding.SAME, Coding.RICE, Coding.DENSE}
_CODINGS: dict[str, frozenset[Coding]] = {
    PLANE_ZSTD: _ALONE,
    RICE_ULP: _WITHOUT_CONTEXT,
    EXP_CTX: _WITHOUT_CONTEXT | {Coding.CONTEXT},
}
ENCODINGS: Final = (RAW, *_CODINGS)
DIFFERENCES: Final = (RICE_ULP, EXP_CTX)


def encode(
    new: Elements,
    old: Elements | None,
    *,
    dtype: str,
    difference: Difference = RICE_ULP,
    kernels: Kernels[Any] | None = None,
    workers: int = 1,
) -> tuple[Encoding, bytes | memoryview]:
    """Return the encoding's name and its bytes, never more of them than `new` has.

    `new` is an array of bytes, or with `TorchKernels` a flat tensor of them on any device; `old` is the same memory at
    the version that the reader holds, of the same size, or None when it holds none. Each of `workers` threads takes
    less than 64 MiB.
    """
    layout = LAYOUTS[dtype]
    kernels = kernels or fastest_kernels(new.nbytes // layout.width)
    written = write_tiles(
        None if old is None else kernels.view(_aligned(old, layout), layout),
        kernels.view(_aligned(new, layout), layout),
        layout=layout,
        kernels=kernels,
        context=difference == EXP_CTX,
        workers=workers,
    )
    if len(written) >= new.nbytes:
        return RAW, kernels.fetch(new).data
    return (PLANE_ZSTD if old is None else difference), written


def decode(
    encoding: str,
    packed: memoryview,
    *,
    weights: Elements,
    dtype: str,
    place: str,
    kernels: Kernels[Any] | None = None,
    workers: int = 1,
) -> bool:
    """Turn `weights`, a copy of the base's bytes or, for encodings that stand alone, any memory, into the new bytes.

    They are an array, or with `TorchKernels` a flat tensor of bytes on any device. Return whether all tiles say what
    they become, which they do unless they were written on a device. Where they do not, or `weights` are not here, only
    the tensor's digest can tell that the base was the right one.

    Raise `IntegrityError`, which names `place`, when `packed` is not what a writer made for this base. No bit of it can
    be wrong without that; all of it is checked before a weight is touched. Memory is bounded by the tiles' size,
    whatever `packed` claims.
    """
    layout = LAYOUTS[dtype]
    loops: Kernels[Any] = kernels or fastest_kernels(weights.nbytes // layout.width)
    try:
        if encoding == RAW:
            require(len(packed) == weights.nbytes, f"{weights.nbytes} raw bytes are {len(packed)}")
            loops.fill(weights, np.frombuffer(packed, np.uint8))
            return True
        require(encoding in _CODINGS, f"encoding {encoding!r} is none of {', '.join(ENCODINGS)}")
        elements = loops.view(weights, layout)
        tiles = read_tiles(packed, len(elements), allowed=_CODINGS[encoding])
        apply_tiles(tiles, elements, layout=layout, kernels=loops, workers=workers)
        return all(tile.digest != NO_DIGEST for tile in tiles)
    except IntegrityError as error:
        msg = f"{place} is refused: {error}; fetch it again, or load from the anchor"
        raise IntegrityError(msg) from error


def _aligned(data: Elements, layout: Layout) -> Elements:
    """Return bytes that can be viewed as elements; those that are mapped from a file may lie between two."""
    if not isinstance(data, np.ndarray):
        return data
    return layout.view(cast("NDArray[np.uint8]", data)).view(np.uint8)
