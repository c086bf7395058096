"""What a trainer tells about itself; light enough for processes without torch."""

import msgspec


class Accumulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `forward_backward` added to the step under way."""

    num_groups: int
    num_samples: int
    tokens_drawn: int
    tokens_trained: int
    masked: dict[str, int] = {}
    """Tokens by reason: part of a sample, but without a loss."""
    dropped: dict[str, int] = {}
    """Tokens by reason: left out."""
    seconds: float = 0.0


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /health` of a trainer answers."""

    step: int
    version: int
    pending_groups: int
    """Groups in the step under way."""
    pending_tokens: int
    """Trained tokens in the step under way."""
    working: str = ""
    """Call being served; empty when idle."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a trainer does not do what it was asked."""

    error: str
    exit_code: int = 1
    """What a command that this ends should end with."""
