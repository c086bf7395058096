"""How many bytes a step of training will publish, from the learning rate and the sizes of the weights.

An optimizer moves a weight by `lr * |u|`, where |u| is about 0.2 for Adam on noisy gradients (1 in its first step,
0.35 where gradients repeat). A published weight changes when the unpublished rest of it, anywhere in its rounding cell,
is carried over the edge: with the probability min(1, lr * |u| / ulp). The ulp is a power of two that follows from the
weight's exponent, so a count of exponents says how many weights change, and how far.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.weights.codec import EXP_CTX, RICE_ULP, Difference, encode
from etude.weights.tensors import FlatTensor
from etude.weights.ulp import LAYOUTS, Layout

Floats = NDArray[np.float64]

USUAL_UPDATE = 0.2
"""Mean of Adam's update in units of the learning rate, when gradients are mostly noise."""
_FAR = 16.0
"""Mean distance in ulps from which a distance is priced by its magnitude and not by its value."""
_DISTANCES = np.arange(-1.0, 130.0)
_GAUSS_BITS = 1.05
"""Entropy of the magnitude of a Gaussian number whose mean magnitude is 1."""
_BEYOND_BINADE_BITS = 2.0
"""More than its mantissa, of a weight that left its binade."""
_ABOVE_ENTROPY: dict[Difference, float] = {RICE_ULP: 1.02, EXP_CTX: 1.06}
"""Measured, of the codes of half-precision tiles that hold at least a Mi of elements."""
_CHUNK = 1 << 22
_SAMPLE = 1 << 20
_MOMENTUM = 0.9
LAGS = (8, 64, 512)


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader that is `steps` behind downloads."""

    steps: int
    in_turn: int
    """Bytes of every difference on the way."""
    at_once: int
    """Bytes of one difference over all the steps."""


class TensorForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor; bytes are those of a step."""

    name: str
    dtype: str
    elements: int
    density: float
    """Share of the elements that a step changes."""
    num_bytes: dict[Difference, int]
    anchor: int
    """Bytes of the tensor in an anchor."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of a policy together; bytes are those of a step."""

    lr: float
    update: float
    elements: int
    raw: int
    """Bytes of the weights."""
    density: float
    num_bytes: dict[Difference, int]
    anchor: int
    """Bytes of a whole copy."""
    anchor_steps: dict[Difference, int]
    """Steps between anchors, which are due when the differences since the last one have a share of its bytes."""
    behind: dict[Difference, tuple[Behind, ...]]
    tensors: tuple[TensorForecast, ...]


class _Binades(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a tensor, or of all, by the size of their ulp."""

    counts: Floats
    ulps: Floats
    mantissa_bits: int


def forecast(
    tensors: Mapping[str, FlatTensor], *, lr: float, update: float = USUAL_UPDATE, anchor_share: float = 0.5
) -> Forecast:
    """Return what steps at a learning rate will publish from these weights on, in their dtypes.

    `update` is the mean magnitude of the optimizer's update in units of `lr`; `anchor_share` is the share of an
    anchor's bytes that differences may have before the next one. A run that starts from weights as they are published
    stays up to a quarter below it for some twenty steps: no rest of a weight is near an edge yet.
    """
    binades = {name: _binades(flat) for name, flat in tensors.items()}
    rows = tuple(_tensor(name, flat, binades[name], lr * update) for name, flat in tensors.items())
    elements, anchor = sum(row.elements for row in rows), sum(row.anchor for row in rows)
    step: dict[Difference, int] = {
        difference: sum(row.num_bytes[difference] for row in rows) for difference in _ABOVE_ENTROPY
    }
    return Forecast(
        lr=lr,
        update=update,
        elements=elements,
        raw=sum(flat.data.size for flat in tensors.values()),
        density=sum(row.density * row.elements for row in rows) / max(1, elements),
        num_bytes=step,
        anchor=anchor,
        anchor_steps={name: math.ceil(anchor_share * anchor / max(1, size)) for name, size in step.items()},
        behind={
            name: tuple(_behind(binades.values(), name, lr * update, steps, size, anchor) for steps in LAGS)
            for name, size in step.items()
        },
        tensors=rows,
    )


def density(flat: FlatTensor, step: float) -> float:
    """Return the share of a tensor's elements that change when each moves by `step` in the mean."""
    return _changes(_binades(flat), step)[0]


def _tensor(name: str, flat: FlatTensor, binades: _Binades, step: float) -> TensorForecast:
    changed, _ = _changes(binades, step)
    return TensorForecast(
        name=name,
        dtype=flat.dtype,
        elements=flat.data.size // LAYOUTS[flat.dtype].width,
        density=changed,
        num_bytes={
            difference: min(flat.data.size, round(_bytes(binades, difference, step))) for difference in _ABOVE_ENTROPY
        },
        anchor=_anchor_bytes(flat),
    )


def _binades(flat: FlatTensor) -> _Binades:
    layout = LAYOUTS[flat.dtype]
    if not layout.exponent_bits:
        return _Binades(counts=np.zeros(0), ulps=np.zeros(0), mantissa_bits=0)
    mask = (1 << layout.exponent_bits) - 1
    counts = np.zeros(mask + 1)
    patterns = layout.view(flat.data)
    for begin in range(0, patterns.size, _CHUNK):
        exponents = (patterns[begin : begin + _CHUNK] >> layout.mantissa_bits).astype(np.int64) & mask
        counts += np.bincount(exponents, minlength=mask + 1)
    return _Binades(counts=counts, ulps=_ulps(layout), mantissa_bits=layout.mantissa_bits)


def _ulps(layout: Layout) -> Floats:
    """Return the distance between neighbours by exponent; subnormal numbers have that of the smallest normal ones."""
    exponents = np.arange(1 << layout.exponent_bits)
    bias = (1 << (layout.exponent_bits - 1)) - 1
    return 2.0 ** (np.maximum(exponents, 1) - bias - layout.mantissa_bits)


def _changes(binades: _Binades, step: float) -> tuple[float, Floats]:
    """Return the density of the whole and of every binade."""
    shares = np.array([1.0 - _distances(ratio)[0] for ratio in step / binades.ulps])
    total = binades.counts.sum()
    return (float(binades.counts @ shares / total) if total else 0.0), shares


@functools.lru_cache(maxsize=1 << 14)
def _distances(ratio: float) -> Floats:
    """Return the probabilities that a weight moves by 0, 1, 2, ... ulps when it moves by `ratio` ulps in the mean.

    The movement is Gaussian, and the rest of the weight is anywhere in its rounding cell. What is missing to 1 is
    further away than the last. The tensors of a model share their ratios, so results are kept.
    """
    if ratio > _FAR:
        return np.zeros(_DISTANCES.size - 2)
    deviation = ratio * math.sqrt(math.pi / 2)
    scaled = _DISTANCES / deviation
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in scaled])
    # Second differences of the twofold integral of the Gaussian: its convolution with both cells.
    twofold = _DISTANCES * below + deviation * np.exp(-(scaled**2) / 2) / math.sqrt(2 * math.pi)
    shares = np.maximum(twofold[2:] - 2 * twofold[1:-1] + twofold[:-2], 0.0)
    shares[1:] *= 2
    shares.setflags(write=False)
    return shares


def _bytes(binades: _Binades, difference: Difference, step: float) -> float:
    """Return the entropy of where and how far, given the exponents or not, and what the codes take above it."""
    _, shares = _changes(binades, step)
    used = [binade for binade, count in enumerate(binades.counts) if count]
    groups = [[binade] for binade in used] if difference == EXP_CTX else [used] * bool(used)
    bits = 0.0
    for group in groups:
        counts = binades.counts[group]
        changed = counts @ shares[group]
        bits += counts.sum() * _entropy(np.array([changed / counts.sum(), 1 - changed / counts.sum()]))
        bits += _value_bits(binades, group, shares, step)
    return bits * _ABOVE_ENTROPY[difference] / 8


def _value_bits(binades: _Binades, group: Sequence[int], shares: Floats, step: float) -> float:
    """Return the bits that say how far all changes of some binades went: signs, and magnitudes by their mixture."""
    near, far, far_bits = np.zeros(_DISTANCES.size - 3), 0.0, 0.0
    for binade in group:
        ratio, changed = step / binades.ulps[binade], binades.counts[binade] * shares[binade]
        if ratio > _FAR:
            far += changed
            far_bits += changed * min(math.log2(ratio) + _GAUSS_BITS, binades.mantissa_bits + _BEYOND_BINADE_BITS)
        else:
            near += binades.counts[binade] * _distances(ratio)[1:]
    total = near.sum() + far
    return float(total * (1.0 + _entropy(np.append(near, far) / total)) + far_bits) if total else 0.0


def _entropy(shares: Floats) -> float:
    positive = shares[shares > 0.0]
    return float(-(positive * np.log2(positive)).sum())


def _behind(
    binades: Iterable[_Binades], difference: Difference, step: float, steps: int, per_step: int, anchor: int
) -> Behind:
    at_once = sum(_bytes(each, difference, step * _growth(steps)) for each in binades)
    return Behind(steps=steps, in_turn=steps * per_step, at_once=min(round(at_once), anchor))


def _growth(steps: int) -> float:
    """Return how much further a weight is after some steps than after one: it walks at random, with momentum."""
    lags = np.arange(1, steps)
    return math.sqrt(steps + 2 * float(((steps - lags) * _MOMENTUM**lags).sum()))


def _anchor_bytes(flat: FlatTensor) -> int:
    """Return the bytes that a tensor takes alone, from what its first Mi of elements takes."""
    sample = flat.data[: _SAMPLE * LAYOUTS[flat.dtype].width]
    if not sample.size:
        return 0
    return round(len(encode(sample, None, dtype=flat.dtype)[1]) / sample.size * flat.data.size)
