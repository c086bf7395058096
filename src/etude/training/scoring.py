"""What the policy being trained thinks of given tokens, on the very path that training takes."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.algorithm.packing import MicroBatch, batch_of
from etude.algorithm.samples import Sample
from etude.errors import RunError
from etude.policy.decoder import Decoder
from etude.policy.logprobs import support_logits, support_rows
from etude.types import Experts, Scored, ScoreRequest, Support


class _Pass(NamedTuple):
    """One forward pass over the tokens."""

    hidden: Tensor
    experts: Experts | None


def score(decoder: Decoder, request: ScoreRequest, *, version: int) -> Scored:
    """Return log-probabilities over the replayed support, with the sampler's experts replayed without exception.

    Raises:
        RunError: The request does not hold together.
    """
    batch = batch_of([_sample(decoder, request)])
    with torch.no_grad():
        own = _run(decoder, batch._replace(replay=None))
        used = own if batch.replay is None else _run(decoder, batch)
        hidden = used.hidden.index_select(0, batch.sources)
        drawn, support = _logprobs(decoder, hidden, batch, request)
        positions = torch.tensor(request.raw_positions, dtype=torch.int64) - request.drawn_from
        raw = (hidden[positions] @ decoder.head.T).float().log_softmax(dim=1)
    return Scored(
        logprobs=_packed(drawn),
        support=support,
        experts=used.experts,
        experts_own=own.experts,
        raw=_packed(raw.flatten()),
        version=version,
    )


def _run(decoder: Decoder, batch: MicroBatch) -> _Pass:
    layers = decoder.blocks
    for layer in layers:
        layer.routed = []
    try:
        encoded = decoder(batch.token_ids, batch.positions, batch.boundaries, replay=batch.replay, plausibility=0.0)
        chosen = [experts for layer in layers for experts in layer.routed or ()]
    finally:
        for layer in layers:
            layer.routed = None
    if not chosen:
        return _Pass(encoded.hidden, None)
    ids = torch.stack(chosen, dim=1).cpu().numpy().astype("<u2")
    experts = Experts(start=0, num_layers=ids.shape[1], top_k=ids.shape[2], expert_ids=ids.tobytes())
    return _Pass(encoded.hidden, experts)


def _logprobs(
    decoder: Decoder, hidden: Tensor, batch: MicroBatch, request: ScoreRequest
) -> tuple[Tensor, Support | None]:
    temperature = request.params.temperature or 1.0
    if request.support is None:
        logits = (hidden @ decoder.head.T).float() / temperature
        return logits.log_softmax(dim=1).gather(1, batch.drawn[:, None])[:, 0], None
    rows, columns = support_rows(decoder.head, batch.support)
    logprobs = (support_logits(hidden, rows, columns) / temperature).log_softmax(dim=1)
    here = batch.support == batch.drawn[:, None]
    drawn = logprobs.masked_fill(~here, -torch.inf).amax(dim=1)
    told = request.support
    mine = Support(counts=told.counts, token_ids=told.token_ids, logprobs=_packed(logprobs[batch.support >= 0]))
    return drawn, mine


def _sample(decoder: Decoder, request: ScoreRequest) -> Sample:
    count, start, vocab = len(request.token_ids), request.drawn_from, decoder.shape.vocab_size
    if not 0 < start < count or not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab:
        raise RunError(f"score needs ids below {vocab}, of which one or more but the first are drawn; see drawn_from")
    if any(not start <= position < count for position in request.raw_positions):
        raise RunError(f"score: raw_positions must lie between drawn_from and {count - 1}")
    counts = np.zeros(count, np.int64)
    ids, logq = np.zeros(0, np.int64), np.zeros(0, np.float32)
    if request.support is not None:
        ids, logq = _array(request.support.token_ids, "<u4"), _array(request.support.logprobs, "<f4")
        known = _array(request.support.counts, "<u2")
        if len(known) != count - start or not len(ids) == len(logq) == known.sum() or int(ids.max(initial=0)) >= vocab:
            raise RunError("score: the support does not fit the drawn tokens")
        counts[start:] = known
    return Sample(
        rollout_id="score",
        advantage=0.0,
        token_ids=np.asarray(request.token_ids, np.int64),
        trained=np.arange(count) >= start,
        logq=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        pools=np.zeros(count, np.int32),
        pool_names=("score",),
        support_counts=counts,
        support_ids=ids.astype(np.int64),
        support_logq=logq.astype(np.float32),
        experts=None if request.experts is None else _experts(decoder, request.experts, count),
    )


def _experts(decoder: Decoder, experts: Experts, count: int) -> NDArray[np.int16]:
    """Return i16[tokens, layers, top_k]; the last token is never an input."""
    shape = decoder.shape
    wanted = (count - 1, shape.layers, shape.experts_per_token)
    found = _array(experts.expert_ids, "<u2")
    told = (experts.start, experts.num_layers, experts.top_k, len(found))
    if told != (0, wanted[1], wanted[2], int(np.prod(wanted))) or int(found.max(initial=0)) >= shape.experts:
        raise RunError("score: the experts do not fit the tokens and the policy")
    rows = np.full((count, *wanted[1:]), -1, np.int16)
    rows[:-1] = found.reshape(wanted)
    return rows


def _array(data: bytes, dtype: str) -> NDArray[np.generic]:
    if len(data) % np.dtype(dtype).itemsize:
        raise RunError(f"score: {len(data)} bytes are no array of {dtype}")
    return np.frombuffer(data, dtype)


def _packed(values: Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
