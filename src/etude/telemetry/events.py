"""What the run ledger records: one struct per fact, tagged `e`, each a line of JSON.

A fact is written by the service that made it, before anything that depends on it: `etude verify` compares what one
service says with what another one says and with the objects in the run directory. Field names are part of the
ledger's format. Times are wall clock and only for people: the order of a writer's lines is the order of its facts.
"""

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="e"):
    """Base of all facts."""

    t: float = 0.0
    """Wall-clock seconds, set by the ledger as it takes the event; may go back."""


class Opened(Event, frozen=True, tag="opened"):
    """A writer began. A controller names the one it goes on from, which is how a run's controllers form a chain."""

    service: str
    """`controller`, `trainer`, or a sampler's id."""
    after: str = ""
    """Writer that the same service had before."""
    after_events: int = 0
    """Facts of that writer that could still be read: a torn tail beyond them is not part of the run."""
    after_chain: str = ""
    """Its chain value at that place."""


class StageStarted(Event, frozen=True, tag="stage_started"):
    """A stage began."""

    stage: str


class StageEnded(Event, frozen=True, tag="stage_ended"):
    """A stage is done."""

    stage: str
    seconds: float
    files: dict[str, str] = {}
    """sha256 of what the stage left, by key."""


class Admitted(Event, frozen=True, tag="admitted"):
    """A task took a slot."""

    ticket: int
    task: str
    version: int
    """Policy version that bounds the group's staleness: `Ticket.admitted_version`."""


class RolloutStarted(Event, frozen=True, tag="rollout_started"):
    """An attempt began, before its sandbox."""

    rollout: str
    session: str
    """Request ids of its model calls are `<session>/<n>`."""
    task: str
    purpose: str
    """`train`, `eval` or `probe`."""


class RolloutEnded(Event, frozen=True, tag="rollout_ended"):
    """An attempt ended, however it did; written before its file."""

    rollout: str
    session: str
    outcome: str
    reward: float | None = None
    reason: str = ""
    """Component and reason of a failure."""
    calls: int = 0
    edges: dict[str, int] = {}
    """The same, by how they hang in its tree (`types.Edge`); empty in records of older versions."""
    drawn: int = 0
    """Tokens in its tree."""
    seconds: float = 0.0
    """Cost: how long its place in the queue of sandboxes was taken."""
    digest: str = ""
    """sha256 of rollouts/<group>/<rollout>.json."""


class GroupReady(Event, frozen=True, tag="group_ready"):
    """A finished group; written before its file, which is written before the trainer may take it."""

    ticket: int
    key: str
    digest: str
    """sha256 of the file."""
    rollouts: tuple[str, ...]
    """Sessions of the trajectories in the group, in order."""
    drawn: int


class GroupLost(Event, frozen=True, tag="group_lost"):
    """A group was given up: its slot is free and its task is not trained."""

    ticket: int
    reason: str


class GroupTaken(Event, frozen=True, tag="group_taken"):
    """A group joined the step that is built from `version`; the order of these is the order of the step."""

    ticket: int
    version: int


class VersionMade(Event, frozen=True, tag="version_made"):
    """The optimizer step over the groups taken for `version - 1` is done."""

    lineage: str
    version: int
    step: int


class LineageOpened(Event, frozen=True, tag="lineage_opened"):
    """The trainer went on from a version that is not the newest published one, or could not repeat its bytes."""

    lineage: str
    version: int
    """First version of the lineage; its weights stem from this version of the parent."""
    parent: str = ""
    reason: str = ""


class Resumed(Event, frozen=True, tag="resumed"):
    """What a controller that follows another one found, before it did anything."""

    step: int
    """Of the checkpoint."""
    replayed: int = 0
    """Optimizer steps repeated from stored groups."""
    restarted: tuple[int, ...] = ()
    """Tickets whose groups are played again."""
    returned: tuple[int, ...] = ()
    """Tickets of groups that had been trained into versions that were given up: they are trained again."""


class CheckpointWritten(Event, frozen=True, tag="checkpoint_written"):
    """What a run may resume from."""

    step: int
    version: int
    lineage: str
    files: dict[str, str]
    """sha256 by key; written before the pointer moves to it."""
    num_bytes: int = 0
    """Of all files."""


class CheckpointDeleted(Event, frozen=True, tag="checkpoint_deleted"):
    """Retention removed a checkpoint."""

    step: int


class EvalEnded(Event, frozen=True, tag="eval_ended"):
    """An evaluation is complete."""

    when: str
    version: int
    lineage: str
    attempts: int
    tasks: int
    pass_rate: float | None


class SandboxCreated(Event, frozen=True, tag="sandbox_created"):
    """Written before the sandbox exists: one that nobody heard of cannot be left behind."""

    sandbox: str


class SandboxDestroyed(Event, frozen=True, tag="sandbox_destroyed"):
    """A sandbox is gone, with everything in it."""

    sandbox: str
    reason: str = ""
    """Empty: its owner was done with it. `launcher_died`: lost with all others of its backend. `owner_died`: found and
    removed by a later controller."""


class ServiceStarted(Event, frozen=True, tag="service_started"):
    """A process of the run came up."""

    service: str
    writer: str
    """Ledger folder of the process."""
    pid: int


class ServiceEnded(Event, frozen=True, tag="service_ended"):
    """A process of the run is gone."""

    service: str
    writer: str
    reason: str
    """Empty for a clean end."""
    events: int = 0
    """What its ledger held when it was read after the end."""
    chain: str = ""


class Quarantined(Event, frozen=True, tag="quarantined"):
    """A replica is out of service until it has proven itself again."""

    sampler: str
    reason: str


class Probed(Event, frozen=True, tag="probed"):
    """A replica's log-probabilities of a fixed sequence agreed with the trainer's."""

    sampler: str
    lineage: str
    version: int
    max_error: float
    experts_equal: float
    """Share of routing choices that were the trainer's."""


class Drawn(Event, frozen=True, tag="drawn"):
    """By a sampler: a completion left the engine."""

    request: str
    prompt: int
    """Tokens in the prompt."""
    prompt_digest: str
    """`telemetry.digests.of_ids` over the whole prompt."""
    tokens: int
    digest: str
    """`telemetry.digests.of_drawn` over ids, log-probabilities, versions, support and experts."""
    versions: tuple[tuple[int, int], ...]
    """Runs of (policy version, tokens)."""
    lineage: str


class Applied(Event, frozen=True, tag="applied"):
    """By a sampler: from its next token on it draws with these weights."""

    lineage: str
    version: int
    digest: str
    """Of the version, from the manifest that the weights were verified against."""
    held: str = ""
    """Digest of the bytes that the engine really holds, in its view; equal on all replicas of a view."""
    view: str = ""


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a group's drawn tokens: drawn = trained + masked + dropped."""

    group: str
    drawn: int
    trained: int
    masked: dict[str, int] = {}
    dropped: dict[str, int] = {}


class Trained(Event, frozen=True, tag="trained"):
    """By the trainer: one optimizer step."""

    lineage: str
    version: int
    step: int
    groups: tuple[TrainedGroup, ...]
    replayed: bool = False
    """The step had been made before a crash, and was repeated."""


class Published(Event, frozen=True, tag="published"):
    """By the trainer: written before the head names the version."""

    lineage: str
    version: int
    digest: str
    manifest: str
    """sha256 of the manifest."""
    base: int | None = None
    """Version that the manifest's differences apply to. A version may have several manifests: each is told of."""
    epoch: int = 0
    """Of the publisher."""
    routes: str = ""
    """sha256 of the page of routes that names the manifest."""
    num_bytes: int = 0
    """Objects written for it."""


class Sealed(Event, frozen=True, tag="sealed"):
    """The last fact of a command that ended in order: what the run directory holds besides the ledger."""

    files: dict[str, tuple[int, str]]
    """Bytes and sha256 of files that are facts of no other event, by key; an append-only file may have grown since."""
    writers: dict[str, tuple[int, str]]
    """Facts and chain value of every other writer's ledger."""


class Closed(Event, frozen=True, tag="closed"):
    """The last fact of a writer that ended in order."""


AnyEvent = (
    Opened
    | StageStarted
    | StageEnded
    | Admitted
    | RolloutStarted
    | RolloutEnded
    | GroupReady
    | GroupLost
    | GroupTaken
    | VersionMade
    | LineageOpened
    | Resumed
    | CheckpointWritten
    | CheckpointDeleted
    | EvalEnded
    | SandboxCreated
    | SandboxDestroyed
    | ServiceStarted
    | ServiceEnded
    | Quarantined
    | Probed
    | Drawn
    | Applied
    | Trained
    | Published
    | Sealed
    | Closed
)
"""Everything that a line of a ledger may be."""
