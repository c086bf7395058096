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


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How the step under way is ended: what `POST /optim_step` takes."""

    publish: bool = True
    """Start publishing the version at once."""
    replayed: bool = False
    """The step was made before a crash."""
    lineage: str = ""
    """That the version belongs to; empty: that of the last version published."""


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer's version is published: what `POST /publish` takes."""

    fork: str = ""
    """Why it must be in a new lineage; empty: in the head's, if it can be."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What `POST /compare` answers."""

    is_head: bool
    """The head names the trainer's version, with exactly its bytes."""


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint to take over: what `POST /restore` takes."""

    step: int
    digests: dict[str, str]
    """sha256 by name of each of the trainer's files."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint."""

    num_bytes: int
    digest: str
    """sha256."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer's version was published: what `POST /publish` answers."""

    lineage: str
    version: int
    digest: str
    opened: str = ""
    """Why a new lineage was opened for it; empty when none was."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a trainer does not do what it was asked."""

    error: str
    exit_code: int = 1
    """What a command that this ends should end with."""
    damaged: bool = False
    """Stored bytes are gone or not what was written: other ones may do."""
