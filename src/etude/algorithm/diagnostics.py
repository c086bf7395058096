"""What the tokens of an optimizer step say about the health of the run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_TINY = 1e-12


class TokenRecord(NamedTuple):
    """Facts about the trained tokens of some micro-batches, before any correction masked them."""

    log_ratio: Float[Tensor, " tokens"]
    """Trainer's log-probability minus the sampler's."""
    weight: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"]
    pull: Float[Tensor, " tokens"]
    support_size: Int[Tensor, " tokens"]
    """0 where the whole vocabulary could be drawn."""
    versions: Int[Tensor, " tokens"]
    pools: Int[Tensor, " tokens"]


def joined(records: Sequence[TokenRecord]) -> TokenRecord:
    """Return one record of all tokens; `pools` must index the same names."""
    return TokenRecord(*(torch.cat(column) for column in zip(*records, strict=True)))


def diagnose(record: TokenRecord, *, version: int, pool_names: Sequence[str]) -> dict[str, float]:
    """Return the step's metrics, trained tokens being the denominator; empty without tokens.

    Names are explained in docs/metrics.md. `version` is the trainer's, at which the tokens are consumed.
    """
    if not len(record.log_ratio):
        return {}
    metrics = _mismatch(record.log_ratio.double())
    for index, name in enumerate(pool_names):
        metrics |= _mismatch_of(name, record.log_ratio[record.pools == index].double())
    metrics |= _ratios(record.log_ratio, record.weight) | _centring(record)
    lag = (version - record.versions).double()
    return metrics | {
        "policy/entropy_nats": record.entropy.double().mean().item(),
        "staleness/mean_versions": lag.mean().item(),
        "staleness/max_versions": lag.max().item(),
    }


def _mismatch(x: Tensor) -> dict[str, float]:
    size = x.abs()
    return {
        "mismatch/k1_nats": -x.mean().item(),
        "mismatch/k3_nats": (x.expm1() - x).mean().item(),
        "mismatch/abs_mean_nats": size.mean().item(),
        "mismatch/abs_p99_nats": _quantile(size, 0.99),
        "mismatch/abs_max_nats": size.max().item(),
    }


def _mismatch_of(pool: str, x: Tensor) -> dict[str, float]:
    if not len(x):
        return {}
    return {
        f"mismatch/k1/{pool}": -x.mean().item(),
        f"mismatch/k3/{pool}": (x.expm1() - x).mean().item(),
        f"mismatch/abs_p99/{pool}": _quantile(x.abs(), 0.99),
        f"mismatch/tokens_count/{pool}": float(len(x)),
    }


def _ratios(log_ratio: Tensor, weight: Tensor) -> dict[str, float]:
    x, w = log_ratio.double(), weight.double()
    masked = w == 0
    return {
        "ratio/min": x.min().exp().item(),
        "ratio/max": x.max().exp().item(),
        "ratio/p01": math.exp(_quantile(x, 0.01)),
        "ratio/p99": math.exp(_quantile(x, 0.99)),
        "ratio/chi2": (x.mul(2).exp().mean() - 1).item(),
        "ratio/ess_fraction": (w.sum() ** 2 / (len(w) * (w**2).sum() + _TINY)).item(),
        "ratio/masked_low_fraction": (masked & (x < 0)).double().mean().item(),
        "ratio/masked_high_fraction": (masked & (x > 0)).double().mean().item(),
    }


def _centring(record: TokenRecord) -> dict[str, float]:
    sizes = record.support_size.double()
    if not bool((sizes > 0).any()):
        return {}
    return {
        "support/size_mean": sizes.mean().item(),
        "support/size_p99": _quantile(sizes, 0.99),
        "support/size_max": sizes.max().item(),
        "support/singleton_fraction": (sizes == 1).double().mean().item(),
        "sc/pull_l1": record.pull.double().mean().item(),
    }


def _quantile(values: Tensor, share: float) -> float:
    # By rank instead of torch.quantile, which refuses more than 16 million values.
    rank = min(len(values), max(1, math.ceil(share * len(values))))
    return values.kthvalue(rank).values.item()
