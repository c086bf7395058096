"""Every record that crosses a process: frozen, keyword-only, without torch.

Per-token arrays travel as little-endian bytes next to a documented dtype (read them with
`numpy.frombuffer(field, "<f4")`), so that a hundred thousand tokens cost their raw size.
New fields get defaults; defaults are values, never calls.
"""

from enum import StrEnum
from typing import NewType

import msgspec

PolicyVersion = NewType("PolicyVersion", int)
"""Optimizer steps behind a set of weights; 0 is the policy that RL started from."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was drawn; it is the last of the drawn tokens."""
    LENGTH = "length"
    """`max_tokens` or the context's end was reached."""
    CANCELLED = "cancelled"
    """The sampler was told to give up; what was drawn so far is returned."""


class Outcome(StrEnum):
    """How a rollout ended. Only `SCORED` and `TRUNCATED` have a reward; the others are never a score."""

    SCORED = "scored"
    """The harness ended by itself and the grader gave a reward."""
    TRUNCATED = "truncated"
    """A budget (calls, tokens, time) ended the harness; the state it left was graded."""
    INFRA_ERROR = "infra_error"
    """Sandbox, sampler, gateway or grader failed: nothing is known about the policy."""
    JUDGE_ERROR = "judge_error"
    """The grader ran but gave no valid reward."""
    HELD = "held"
    """A screen holds the rollout out of baseline and loss."""
    CANCELLED = "cancelled"
    """The run was drained while the rollout was played."""


class Edge(StrEnum):
    """How a call hangs in the tree of its session. Calls with a parent extend exactly its tokens."""

    ROOT = "root"
    """The first call of the session, or of a conversation that has nothing to do with the others."""
    CONTINUATION = "continuation"
    """The prompt extends the tokens of the parent."""
    RETRY = "retry"
    """The same prompt as an earlier call's, beside it: the harness asked again."""
    COMPACTION = "compaction"
    """A conversation that goes on from a summary which the policy wrote."""
    SUBAGENT_CALL = "subagent_call"
    """The first call of an agent that another one started."""
    SUBAGENT_RETURN = "subagent_return"
    """A continuation that brings the answer of a sub-agent to the agent that started it."""
    AUXILIARY = "auxiliary"
    """Nothing of the task: a title, a ping, a topic. It is never trained on."""
    REWRITE = "rewrite"
    """The harness changed its history, so the prompt starts a new branch."""
    TOOLS_CHANGED = "tools_changed"
    """The tool definitions changed, so the prompt starts a new branch."""
    UNEXTENDABLE = "unextendable"
    """The renderer could not extend the parent's tokens byte for byte."""


WITH_REWARD = (Outcome.SCORED, Outcome.TRUNCATED)
"""Outcomes that have a reward and enter a baseline."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem: a Harbor task directory that passed validation."""

    task_id: str
    """Unique within a run; the directory's name."""
    path: str
    """Absolute path of the task directory."""
    digest: str
    """sha256 over the directory's relative paths and bytes."""
    instruction: str
    """Text of `instruction.md`."""
    workdir: str = "/app"
    """Where the agent starts, inside the sandbox."""
    agent_timeout_s: float = 60.0
    verifier_timeout_s: float = 60.0
    cpus: float = 1.0
    memory_mb: int = 512
    storage_mb: int = 128
    env: dict[str, str] = {}
    """Environment variables of the sandbox, from the Dockerfile's ENV lines."""
    metadata: dict[str, str] = {}
    """Free-form facts about where the task comes from, such as its kind of fault."""


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` tokens in a row drawn under policy version `version`."""

    version: int
    count: int


class Support(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The token ids that could have been drawn at each position, as compressed rows.

    Row t has `counts[t]` ids, sorted ascending, with their log-probabilities under the distribution the token was
    drawn from (they sum to one). A row of length 0 means that the support is unknown.
    """

    counts: bytes
    """u16[n]."""
    token_ids: bytes
    """u32[sum(counts)]."""
    logprobs: bytes
    """f32[sum(counts)], natural logarithm."""


class Experts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Experts that the sampler's routers chose, per input position, MoE layer and rank of choice."""

    start: int
    """Index, in the whole sequence, of the first position covered."""
    num_layers: int
    """MoE layers, in the order of the model."""
    top_k: int
    expert_ids: bytes
    """u16[positions, num_layers, top_k], each row sorted ascending."""

    @property
    def num_positions(self) -> int:
        """Positions covered."""
        return len(self.expert_ids) // (2 * self.num_layers * self.top_k)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The distribution to draw from. Penalties do not exist here: they would change it without changing the support."""

    temperature: float = 1.0
    """0 draws the most likely token; such tokens are never trained on."""
    top_p: float = 0.97
    top_k: int = 64
    """0 keeps the whole vocabulary."""
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """With equal weights and prompt, the same seed draws the same tokens whatever else is in the batch."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One completion to draw: what a sampler's `POST /sample` takes, as msgpack."""

    request_id: str
    """Unique; the same id again returns the same completion instead of drawing twice."""
    session_id: str
    """Requests of one session share their prefix, so they should meet the same sampler."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    min_version: int | None = None
    """Serve only under this policy version or a newer one, else 409."""
    exact_version: int | None = None
    """Serve only under exactly this policy version, and keep it for the whole completion, else 409."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to look at as if they were being drawn: what `POST /score` of a sampler and of a trainer takes."""

    token_ids: tuple[int, ...]
    drawn_from: int
    """Index of the first token that counts as drawn, from 1."""
    params: SamplingParams
    """`max_tokens`, `stop_token_ids` and `seed` play no part."""
    raw_positions: tuple[int, ...] = ()
    """Indices of drawn tokens, ascending, for which the whole vocabulary is asked for."""
    exact_version: int | None = None
    """Score under exactly this policy version, else 409; the version held when asked, if None."""
    support: Support | None = None
    """Of a sampler, for the trainer to normalise over; None for the whole vocabulary. Samplers use their own."""
    experts: Experts | None = None
    """Of a sampler, for the trainer to replay, from position 0 on; None lets the router choose."""


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What the weights of one policy version think of given tokens."""

    logprobs: bytes
    """f32[drawn]: of each drawn token under the distribution it would be drawn from; -inf outside of the support."""
    support: Support | None = None
    """Ids that could have been drawn; a trainer names those that it was given, with its own log-probabilities."""
    experts: Experts | None = None
    """Experts that were really used, from position 0 to the last but one token."""
    experts_own: Experts | None = None
    """By a trainer: those that its router would have used without a replay."""
    raw: bytes = b""
    """f32[raw_positions, vocabulary]: log-probabilities at temperature 1, nothing truncated."""
    lineage: str = ""
    version: int


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a sampler drew, with everything the trainer needs to know about how it was drawn."""

    token_ids: tuple[int, ...]
    """n drawn tokens, the stop token included."""
    sampler_logprobs: bytes
    """f32[n]: log-probability of each drawn token under the distribution it was drawn from."""
    versions: tuple[VersionRun, ...]
    """Policy version of each drawn token; the counts sum to n and the versions never fall."""
    finish_reason: FinishReason
    pool: str
    """The pool whose sampler drew it."""
    lineage: str = ""
    support: Support | None = None
    experts: Experts | None = None
    """Every position from `experts.start` to `len(prompt) + n - 2`: the last drawn token has not been an input yet."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were kept from an earlier request of the session."""


class Node(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model call of a session; stores only what the call added to its parent."""

    node_id: int
    """In the order in which the calls were answered. A parent's can be greater: see `gateway.tree`."""
    parent: int | None
    """`node_id` of the parent, which comes before its children in every record; None for the root of a branch."""
    edge: Edge
    reason: str = ""
    """Why this edge: short and stable, to count by. Empty in records of older versions."""
    link: int | None = None
    """`node_id` of the call that this one belongs to though it does not extend it: that drew the summary of a
    COMPACTION, that started the sub-agent of a SUBAGENT_CALL, that gave the answer of a SUBAGENT_RETURN, that a RETRY
    repeats, whose conversation a REWRITE, TOOLS_CHANGED or UNEXTENDABLE shares."""
    prompt_ids: tuple[int, ...]
    """Tokens between the parent's last drawn token and this call's first one; the whole prompt for a root."""
    completion: Completion
    """`experts`, when present, covers positions `max(0, parent_length - 1)` up to this node's last but one, so that a
    branch's experts concatenate without gap or overlap."""
    started_s: float = 0.0
    """Seconds since the session was opened."""
    seconds: float = 0.0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rollout has no score."""

    component: str
    """`sandbox`, `harness`, `gateway`, `sampler`, `grader` or `worker`."""
    reason: str
    """Short and stable, to count by."""
    message: str = ""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one rollout."""

    rollout_id: str
    session_id: str = ""
    """Of its model calls, whose request ids are `<session>/<n>`; another one each time the rollout is played."""
    group_id: str
    task_id: str
    index: int
    outcome: Outcome
    reward: float | None = None
    """None means never scored, 0.0 means scored zero."""
    nodes: tuple[Node, ...] = ()
    failure: Failure | None = None
    harness_exit: int | None = None
    seconds: float = 0.0
    timings: dict[str, float] = {}
    """Seconds per stage: `sandbox`, `harness`, `model`, `grade`."""
    metrics: dict[str, float] = {}
    """Whatever else the grader or the gateway counted."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts at one task that share a baseline."""

    group_id: str
    task_id: str
    ticket: int
    """Place in the order of admission, from 0."""
    admitted_version: int
    """The oldest policy version that a sampler served when the group was admitted."""
    trajectories: tuple[Trajectory, ...]


class SamplerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /health` of a sampler answers."""

    sampler_id: str
    pool: str
    view: str
    lineage: str
    version: int
    """Policy version of the weights that the next token will be drawn with."""
    digest: str
    """Digest of that version, from its manifest."""
    running: int = 0
    waiting: int = 0
    tokens_drawn: int = 0
    steps: int = 0
    """Decoding steps so far: they stand still while the engine hangs, though its process answers."""
    swaps: int = 0
    swap_seconds_max: float = 0.0
    max_context: int = 0
    held: str = ""
    """Digest of the bytes that the engine really holds: equal on all samplers of a view, and `digest` where that is how
    the version is published."""
    fault: str = ""
    """Why it serves nothing until its next version; empty when it serves."""
    draining: bool = False
    """It was told to leave: it wants no new sessions, and serves those that it has."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    step: int
    version: int
    """Policy version that the step made: equal to `step` within a run that was never rolled back."""
    loss: float
    num_groups: int
    num_samples: int
    tokens_trained: int
    metrics: dict[str, float] = {}
    """Named `room/noun_unit`; see docs/metrics.md."""
    seconds: float = 0.0
