"""The requests an engine holds: what each has drawn, and what a decode step needs to know of all of them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from etude.sampling.engine import Answer, Forced
from etude.types import Experts, FinishReason, SampleRequest, Support

_SUPPORT_IDS_MAX = 0xFFFF

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """One request."""

    request: SampleRequest
    limit: int
    """Tokens to draw at most."""
    stops: frozenset[int]
    truncated: bool
    """Its support is smaller than the vocabulary."""
    forced: Forced | None = None
    salt: int = -1
    """The engine's weights when its prompt was begun; -1 before that."""
    cached: int = 0
    filled: int = 0
    """Prompt tokens whose keys and values are in the slot."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    support_counts: list[int] = field(default_factory=list[int])
    support_ids: list[Ids] = field(default_factory=list[Ids])
    support_logprobs: list[Floats] = field(default_factory=list[Floats])
    raw: list[Floats] = field(default_factory=list[Floats])

    @property
    def to_fill(self) -> int:
        """Prompt tokens to compute before the first draw: the last one is the first decode step's input."""
        return len(self.request.prompt_ids) - 1 - self.filled

    def record(self, token: int, logprob: float, ids: Ids, logprobs: Floats) -> FinishReason | None:
        """Add a drawn token with its support; return why the row ends with it, if it does."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        known = len(ids) <= _SUPPORT_IDS_MAX
        self.support_counts.append(len(ids) if known else 0)
        if known:
            self.support_ids.append(ids)
            self.support_logprobs.append(logprobs)
        if token in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.limit else None

    def answer(self, reason: FinishReason, routes: npt.NDArray[np.int16] | None) -> Answer:
        """Pack what was drawn; `routes` is [inputs - cached, layers, top_k], sorted."""
        support = experts = None
        if self.truncated and self.support_ids:
            support = Support(
                counts=np.asarray(self.support_counts, "<u2").tobytes(),
                token_ids=np.concatenate(self.support_ids).astype("<u4").tobytes(),
                logprobs=np.concatenate(self.support_logprobs).astype("<f4").tobytes(),
            )
        if routes is not None:
            _, num_layers, top_k = routes.shape
            ids = routes.astype("<u2").tobytes()
            experts = Experts(start=self.cached, num_layers=num_layers, top_k=top_k, expert_ids=ids)
        return Answer(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            sampler_logprobs=np.asarray(self.logprobs, "<f4").tobytes(),
            finish_reason=reason,
            support=support,
            experts=experts,
            cached_tokens=self.cached,
            raw=b"".join(row.astype("<f4").tobytes() for row in self.raw),
        )


class RowTable:
    """Per-row state as arrays: entry i belongs to the row in slot i."""

    def __init__(self, slots: int) -> None:
        self.token = np.zeros(slots, np.int64)
        """The next input."""
        self.position = np.zeros(slots, np.int64)
        """Where it stands; the slot holds everything before it."""
        self.origin = np.zeros(slots, np.int64)
        """`position` of the first draw."""
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.ones(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)

    def put(self, index: int, request: SampleRequest, vocab: int) -> None:
        """Describe a request whose prompt is computed but for its last token."""
        params = request.params
        greedy = params.temperature == 0
        self.token[index] = request.prompt_ids[-1]
        self.position[index] = self.origin[index] = len(request.prompt_ids) - 1
        self.seed[index] = params.seed % 2**64
        self.temperature[index] = 1.0 if greedy else params.temperature
        self.top_k[index] = 1 if greedy else min(params.top_k or vocab, vocab)
        self.top_p[index] = 1.0 if greedy else params.top_p

    def move(self, source: int, target: int) -> None:
        """Copy an entry."""
        for column in (
            self.token,
            self.position,
            self.origin,
            self.seed,
            self.temperature,
            self.top_k,
            self.top_p,
        ):
            column[target] = column[source]
