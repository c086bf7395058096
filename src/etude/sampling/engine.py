"""What a sampler asks of an engine: tokens in, tokens out. Engines know nothing of policy versions."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from etude.types import Experts, FinishReason, SampleRequest, Support

if TYPE_CHECKING:
    from torch import Tensor

Commit = Callable[[], Mapping[str, int]]
"""Puts staged weights in place; returns how many tokens each unfinished request had drawn before that."""


class Forced(msgspec.Struct, frozen=True, kw_only=True):
    """What a request draws whatever its distribution says: it is decoded like any other, and recorded as if drawn."""

    token_ids: tuple[int, ...]
    raw_draws: frozenset[int] = frozenset()
    """Indices of draws whose whole distribution is asked for."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request, finished. The fields mean what they mean in `Completion`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    sampler_logprobs: bytes = b""
    finish_reason: FinishReason = FinishReason.STOP
    support: Support | None = None
    experts: Experts | None = None
    cached_tokens: int = 0
    raw: bytes = b""
    """f32[raw draws, vocabulary]: log-probabilities at temperature 1, nothing truncated."""
    failure: str = ""
    """Why nothing usable was drawn; empty for a sound answer."""


class Engine(Protocol):
    """Draws for several requests at once. Called from one thread only, `stage` excepted."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    @property
    def free_slots(self) -> int:
        """Requests that `admit` would take now."""
        ...

    def admit(self, request: SampleRequest, forced: Forced | None = None) -> None:
        """Take a request between two steps. Raise `ContextOverflowError` or `SamplerError` when it cannot be served.

        A forced one ends with its last token; a token outside of its support has a log-probability of -inf.
        """
        ...

    def step(self) -> Sequence[Answer]:
        """Draw one token for every request that is ready, and return those that ended. Returns soon, always."""
        ...

    def cancel(self, request_id: str) -> Answer | None:
        """Give a request up: return what it has drawn, or None when it is not known."""
        ...

    def stage(self, tensors: "Mapping[str, Tensor]") -> Commit:
        """Prepare weights, by Hugging Face name, while steps go on; the result is called between two steps.

        Requests that are running keep what they have computed; later requests never reuse it.
        """
        ...

    def held_digest(self) -> str:
        """Return `policy.digest.held_digest` of the weights that the next step will multiply with."""
        ...
