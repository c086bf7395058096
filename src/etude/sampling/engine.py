"""What a sampler asks of an engine: tokens in, tokens out. Engines know nothing of policy versions."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from etude.types import Experts, FinishReason, SampleRequest, Support

if TYPE_CHECKING:
    from torch import Tensor

Commit = Callable[[], Mapping[str, int]]
"""Puts staged weights in place; returns how many tokens each unfinished request had drawn before that."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request, finished. The fields mean what they mean in `Completion`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    sampler_logprobs: bytes = b""
    finish_reason: FinishReason = FinishReason.STOP
    support: Support | None = None
    experts: Experts | None = None
    cached_tokens: int = 0
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

    def admit(self, request: SampleRequest) -> None:
        """Take a request between two steps. Raise `ContextOverflowError` or `SamplerError` when it cannot be served."""
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


@runtime_checkable
class Scorer(Protocol):
    """An engine that can also be asked what it thinks of given tokens."""

    def score(self, token_ids: Sequence[int]) -> bytes:
        """Return f32[n - 1]: log-probability of each token but the first, over the whole vocabulary."""
        ...
