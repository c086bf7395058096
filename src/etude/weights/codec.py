"""Tensors' bytes to the bytes that travel, and back, bit for bit.

`rice_ulp` codes what changed and can be read without the base; `exp_ctx` is smaller and cannot; `plane_zstd` stands
alone; `raw` is the bytes themselves. Where most weights changed, both differences fall back to whatever is smallest.
"""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from etude.errors import IntegrityError
from etude.weights.bits import require
from etude.weights.compiled import fastest_kernels
from etude.weights.delta import Coding
from etude.weights.kernels import Kernels
from etude.weights.tiles import apply_tiles, read_tiles, write_tiles
from etude.weights.ulp import LAYOUTS

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
    new: NDArray[np.uint8],
    old: NDArray[np.uint8] | None,
    *,
    dtype: str,
    difference: Difference = RICE_ULP,
    kernels: Kernels | None = None,
    workers: int = 1,
) -> tuple[Encoding, bytes | memoryview]:
    """Return the encoding's name and its bytes, never more of them than `new` has.

    `old` is the same memory at the version that the reader holds, of the same size, or None when it holds none. Each of
    `workers` threads takes less than 64 MiB.
    """
    layout = LAYOUTS[dtype]
    written = write_tiles(
        None if old is None else layout.view(old),
        layout.view(new),
        layout=layout,
        kernels=kernels or fastest_kernels(new.size // layout.width),
        context=difference == EXP_CTX,
        workers=workers,
    )
    if len(written) >= new.size:
        return RAW, new.data
    return (PLANE_ZSTD if old is None else difference), written


def decode(
    encoding: str,
    packed: memoryview,
    *,
    weights: NDArray[np.uint8],
    dtype: str,
    place: str,
    kernels: Kernels | None = None,
    workers: int = 1,
) -> None:
    """Turn `weights`, a copy of the base's bytes or, for encodings that stand alone, any memory, into the new bytes.

    Raise `IntegrityError`, which names `place`, when `packed` is not what a writer made for this base. No bit of it can
    be wrong without that; all of it is checked before a weight is touched. Memory is bounded by the tiles' size,
    whatever `packed` claims.
    """
    try:
        if encoding == RAW:
            require(len(packed) == weights.size, f"{weights.size} raw bytes are {len(packed)}")
            weights[:] = np.frombuffer(packed, np.uint8)
            return
        require(encoding in _CODINGS, f"encoding {encoding!r} is none of {', '.join(ENCODINGS)}")
        layout = LAYOUTS[dtype]
        elements = weights.view(layout.unsigned)
        tiles = read_tiles(packed, elements.size, allowed=_CODINGS[encoding])
        apply_tiles(tiles, elements, layout=layout, kernels=kernels or fastest_kernels(elements.size), workers=workers)
    except IntegrityError as error:
        msg = f"{place} is refused: {error}; fetch it again, or load from the anchor"
        raise IntegrityError(msg) from error
