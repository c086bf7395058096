"""The Agent Trajectory Interchange Format (ATIF) v1.8, as far as etude writes and shows it.

The format is closed (readers refuse unknown keys), so everything of ours lives in `extra`.
"""

import msgspec

SCHEMA_VERSION = "ATIF-v1.8"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tool call of an agent's turn."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, object]
    """Always an object: arguments that are not valid JSON are kept whole under `_raw`."""


class TrajectoryRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names a trajectory that is embedded in the same document."""

    trajectory_id: str


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tool answered."""

    source_call_id: str | None = None
    """A `tool_call_id` of the same step."""
    content: str | None = None
    subagent_trajectory_ref: tuple[TrajectoryRef, ...] | None = None
    """The sub-agents that were started in this step."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools of one turn answered."""

    results: tuple[Result, ...] = ()


class Metrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one model call."""

    prompt_tokens: int | None = None
    """The whole context, cached tokens included."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class FinalMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of all model calls, branches that the harness left included."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_steps: int | None = None


class Agent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The harness and the model behind it."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: tuple[dict[str, object], ...] | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message; tool answers are part of the step that called the tools."""

    step_id: int
    """Consecutive, from 1."""
    source: str
    """`system`, `user` or `agent`; only agents call tools, reason or have metrics."""
    message: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    """It repeats what another trajectory tells, or what nobody drew: never to be trained on."""
    extra: dict[str, object] | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model call in the tree of its session."""

    node: int
    parent: int | None = None
    edge: str
    reason: str = ""
    """Why this edge."""
    link: int | None = None
    """The call that it belongs to though it does not extend it; see `types.Node.link`."""
    prompt_tokens: int
    """Added to the parent's."""
    drawn_tokens: int
    versions: tuple[int, int] | None = None
    """Oldest and newest version that drew them."""
    finish_reason: str = ""
    tools: tuple[str, ...] = ()
    """Names of the tools that its answer calls."""
    started_s: float = 0.0
    """Seconds since the session was opened."""
    seconds: float = 0.0


class Sidecar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a rollout ended: `extra.etude` of a document, since ATIF has no place for a reward."""

    rollout_id: str
    group_id: str
    task_id: str
    index: int
    purpose: str
    outcome: str
    reward: float | None = None
    failure: dict[str, str] | None = None
    harness_hash: str | None = None
    """Of the harness's files and configuration; its name and version are the document's `agent`."""
    harness_exit: int | None = None
    truncated: str | None = None
    """The limit that ended the session."""
    seconds: float = 0.0
    timings: dict[str, float] = {}
    metrics: dict[str, float | None] = {}
    """None where a number was not finite."""
    policy_versions: tuple[int, int] | None = None
    """Oldest and newest version that drew a token."""
    calls: tuple[Call, ...] = ()
    """The tree of the session, parents before children; absent in documents of older versions."""


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """`extra` of a document that etude wrote."""

    etude: Sidecar


class Embedded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation beside the main one: of a sub-agent, before or after a summary, or of an auxiliary call."""

    schema_version: str
    session_id: str
    trajectory_id: str
    """Unique within the document that embeds it."""
    agent: Agent
    steps: tuple[Step, ...]
    extra: dict[str, object] | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rollout as people and other tools read it."""

    schema_version: str
    agent: Agent
    steps: tuple[Step, ...]
    extra: Extra
    session_id: str | None = None
    trajectory_id: str | None = None
    final_metrics: FinalMetrics | None = None
    subagent_trajectories: tuple[Embedded, ...] | None = None
