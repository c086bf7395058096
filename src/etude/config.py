"""The configuration of a run: typed, closed (unknown keys are refused), with a docstring per field.

Pure data: `problems` explains a mistake in it; files, overrides and provenance live in `runtime.settings`.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from etude.learning_config import AlgorithmSection, PretrainSection, Section, SftSection, TrainerSection

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class RunSection(Section):
    """Where the run lives."""

    url: str = "runs/run"
    """Run directory: a local path, or file://, s3://, gs://, az:// followed by bucket and prefix."""
    seed: int = 0
    """Every random choice of the run derives from it."""
    region: str = ""
    """Where `etude run` and its sandboxes are, as `pools.region` spells it; empty: near to all."""
    deterministic: bool = False
    """Make the run repeatable bit by bit, at the price of speed: samplers decode one request at a time and groups join
    a step in the order of admission. Needs `rollout.max_staleness = 0` and a single sampler, else timing decides."""


class ShapeSection(Section):
    """Size of a policy that is made from nothing; ignored when `policy.path` is set."""

    vocab: PositiveInt = 512
    """Token ids; the tokenizer that `pretrain` trains has this many at most."""
    hidden: PositiveInt = 128
    """Width of the residual stream."""
    layers: PositiveInt = 4
    """Decoder blocks."""
    heads: PositiveInt = 4
    """Query heads."""
    kv_heads: PositiveInt = 2
    """Key and value heads; each serves heads / kv_heads query heads."""
    head_dim: PositiveInt = 32
    """Width of a head."""
    experts: PositiveInt = 8
    """Experts per layer; 1 makes a dense model."""
    experts_per_token: PositiveInt = 2
    """Experts that a token is routed to."""
    expert_hidden: PositiveInt = 128
    """Width inside an expert."""
    context: PositiveInt = 1024
    """Longest sequence, prompt and answer together, in tokens."""

    @model_validator(mode="after")
    def _choices_fit(self) -> "ShapeSection":
        if self.experts_per_token > self.experts:
            msg = f"policy.shape.experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})"
            raise ValueError(msg)
        if self.heads % self.kv_heads:
            msg = f"policy.shape.heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            raise ValueError(msg)
        return self


class PolicySection(Section):
    """The model being trained."""

    path: str = ""
    """Local Hugging Face model directory to start from; empty: a model made from nothing by `pretrain` and `sft`."""
    renderer: Literal[
        "auto",
        "chatml",
        "chatml-compact",
        "smollm2",
        "qwen3",
        "qwen3-keep",
        "qwen3-thinking",
        "qwen3-thinking-keep",
        "qwen3-no-thinking",
        "deepseek-v3",
        "deepseek-v3.1",
        "deepseek-v3.1-thinking",
        "deepseek-v3.1-thinking-keep",
        "deepseek-r1",
        "deepseek-r1-keep",
        "kimi-k2",
        "kimi-k2-thinking",
        "kimi-k2-thinking-keep",
        "llama-3",
        "template",
    ] = "auto"
    """How messages become tokens; `auto` finds it out from the model directory (see `etude gateway check`)."""
    shape: ShapeSection = ShapeSection()
    """Size of a policy made from nothing."""


class TasksSection(Section):
    """Where problems come from: directories of Harbor tasks, or a generated family."""

    train: str = ""
    """Directory whose subdirectories are the training tasks."""
    heldout: str = ""
    """Directory whose subdirectories are the held-out tasks."""
    family: Literal["", "pyfix", "longread"] = ""
    """Generate the tasks into the run directory instead of reading them: `pyfix` has small Python modules to repair,
    `longread` texts of several times the context, for `harness.compaction`."""
    num_train: PositiveInt = 300
    """Training tasks that a family generates."""
    num_heldout: PositiveInt = 60
    """Held-out tasks that a family generates; what is asked for is shared with no training task."""


class EnvironmentSection(Section):
    """Sandboxes."""

    backend: Literal["local"] = "local"
    """What sandboxes are made of; `local` uses the namespaces of this host."""
    require: tuple[str, ...] = ("process_isolated", "filesystem_isolated", "network_isolated")
    """Capabilities without which the run refuses to start; an empty list accepts whatever the host can do."""
    concurrency: PositiveInt = 16
    """Sandboxes alive at once."""


class CompactionSection(Section):
    """When a harness goes on from a summary that the policy wrote, as far as it does so at all; see compaction.md."""

    trigger_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of a conversation, prompt and answer as its API counts them, from which on the harness is to ask for a
    summary and begin anew with it; 0 is never. Leave room in the context for a tool's result and a summary."""


class EdgeRule(Section):
    """What some calls of a harness are, where their messages do not tell. All conditions that are given must hold."""

    name: Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]
    """The reason that the calls get."""
    edge: Literal["auxiliary", "compaction", "subagent_call", "rewrite", "root"]
    """What they are. `auxiliary` is never trained on; `root` is a conversation of its own, which is."""
    system: str = ""
    """Regular expression that is found in the system prompt."""
    first_user: str = ""
    """Regular expression that is found in the first message of the user."""
    last_user: str = ""
    """Regular expression that is found in the last message of the user, of calls that go on from another one too."""
    anywhere: str = ""
    """Regular expression that is found in any message."""
    max_tokens: PositiveInt | None = None
    """It asks for so many tokens at most, and for fewer than the session's main conversation."""
    no_tools: bool = False
    """It offers no tools, while the main conversation does."""
    other_model: bool = False
    """It names another model than the main conversation."""
    single: bool = False
    """It is one question and one answer, with which nothing goes on."""

    @model_validator(mode="after")
    def _can_hold(self) -> "EdgeRule":
        """Refuse what is no regular expression, and what cannot be known when the call is made."""
        for pattern in (self.system, self.first_user, self.last_user, self.anywhere):
            try:
                re.compile(pattern)
            except re.error as error:
                msg = f"harness.rules: {pattern!r} of rule {self.name!r} is no regular expression: {error}"
                raise ValueError(msg) from error
        compares = self.max_tokens is not None or self.no_tools or self.other_model or self.single
        if compares and self.edge not in ("auxiliary", "root"):
            msg = f"harness.rules: rule {self.name!r} may only look at messages, since its edge is {self.edge!r}"
            raise ValueError(msg)
        return self


class HarnessSection(Section):
    """The agent program. It is given the address of a model and a key, and knows nothing of training."""

    command: tuple[str, ...] = ("python3", "-I", "-S", "/opt/harness/mini.py", "{instruction}")
    """Program and arguments, run inside the sandbox in the task's workdir; `{instruction}` is replaced."""
    files: str = ""
    """Directory placed read-only at /opt/harness; empty: the built-in mini harness."""
    env: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Environment variables of the harness, added to those of the sandbox."""
    max_calls: PositiveInt = 12
    """Model calls per session; the next one is refused and the rollout counts as truncated."""
    max_session_tokens: PositiveInt = 4096
    """Drawn tokens per session, all calls together."""
    compaction: CompactionSection = CompactionSection()
    """Conversations longer than the model's context."""
    rules: tuple[EdgeRule, ...] = ()
    """What calls of this harness are, before the built-in rules are asked; the first rule that holds counts."""


class SamplingSection(Section):
    """The distribution that tokens are drawn from; harnesses cannot change it."""

    temperature: PositiveFloat = 1.0
    """Divides the logits before truncation."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.97
    """Keeps the most likely tokens that together have this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0, le=1024)] = 64
    """Keeps this many of the most likely tokens; 0 keeps the whole vocabulary."""
    max_tokens: PositiveInt = 128
    """Drawn tokens per call."""


class PoolSection(Section):
    """Samplers that share engine, precision and place."""

    name: str
    """How metrics and logs call the pool."""
    engine: Literal["torch"] = "torch"
    """Decoding loop; `torch` is built in."""
    view: Literal["fp32", "bf16", "fp8", "fp8_block", "int8", "int4"] = "fp32"
    """Precision in which the pool holds a version: `fp32` or `bf16`, or codes with scales for the linear layers, which
    are float8_e4m3 with a scale per row (`fp8`) or per 128 by 128 block (`fp8_block`), `int8` per row, or `int4` per 32
    neighbours in a row."""
    view_source: Literal["local", "derived"] = "local"
    """Where the view comes from: each sampler makes it from the published weights, or follows a chain of the view
    itself, which the run derives in a process of its own: a fraction of the bytes, and the very same bits."""
    replicas: PositiveInt = 1
    """Sampler processes."""
    max_batch: PositiveInt = 32
    """Requests decoded together."""
    threads: PositiveInt = 1
    """CPU threads of each process."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")] = "cpu"
    """Torch device that each process computes on: `cpu`, `cuda` or `cuda:1`. New weights are unpacked there as well."""
    price: PositiveFloat = 1.0
    """Of a second of a sampler, in any unit that all pools share: twice the price has to be twice as fast."""
    region: str = ""
    """Where the samplers are; one that is not `run.region` counts as half as expensive again."""
    probe_tolerance: Annotated[float, Field(ge=0.0)] = 0.0
    """Mean difference to the trainer's log-probabilities, in nats, beyond which a sampler may not serve; 0 takes the
    view's own: 1e-4 for `fp32`, 0.1 for `bf16`, 0.2 for `int8`, 0.4 for `fp8` and `fp8_block`, 1 for `int4`."""

    @model_validator(mode="after")
    def _view_is_derived(self) -> "PoolSection":
        if self.view_source == "derived" and self.view == "fp32":
            msg = f"pools: {self.name} wants a derived chain of view fp32, which is what is published; use local"
            raise ValueError(msg)
        return self


class RolloutSection(Section):
    """How attempts are played."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Attempts at one task, which share a baseline."""
    groups_per_step: PositiveInt = 8
    """Groups of one optimizer step."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Versions between the oldest weights a group may have been drawn with and those it is trained into."""
    min_survivors: Annotated[int, Field(ge=2)] = 2
    """A group with fewer scored rollouts is reported lost."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Attempts again after an infrastructure failure."""


class EvalSection(Section):
    """Pass rate on the held-out tasks."""

    attempts: PositiveInt = 4
    """Attempts at each task."""


class WeightsSection(Section):
    """The chain from trainer to samplers."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the published policy version; views are derived from it."""
    anchor_share: PositiveFloat = 0.5
    """A full copy is added once the differences since the last one have this share of its bytes."""
    skips: tuple[Annotated[int, Field(ge=2)], ...] = (8, 64)
    """Every so many versions, a difference over as many is added, for readers that are behind."""
    encoders: PositiveInt = 1
    """Threads that encode a version."""
    uploads: PositiveInt = 4
    """Objects of a version that are stored at a time."""
    upload_mb_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Megabytes per second that publishing may use; 0 is as fast as the line."""
    difference: Literal["rice_ulp", "exp_ctx"] = "rice_ulp"
    """How a difference is coded: `exp_ctx`, for readers far away, has up to half the size for 2 to 3 times the CPU."""
    poll_s: PositiveFloat = 0.2
    """How often samplers look at the head."""


class CheckpointSection(Section):
    """What a run resumes from."""

    every: PositiveInt = 5
    """Optimizer steps between checkpoints; steps after the last one are repeated from stored groups on a resume."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept; older ones are deleted."""
    max_bytes: PositiveInt = 1 << 36
    """Bytes of all checkpoints together, beyond which older ones than the newest are deleted too."""


class SupervisionSection(Section):
    """How the processes of a run are watched."""

    heartbeat_s: PositiveFloat = 1.0
    """Seconds between looks at each process."""
    lease_s: PositiveFloat = 30.0
    """A process that has not answered for so long is ended and started anew."""
    restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one process within `restart_window_s` after which the run stops."""
    restart_window_s: PositiveFloat = 300.0
    """Time over which restarts are counted."""
    backoff_s: PositiveFloat = 0.5
    """Pause before the first restart; it doubles with each further one, up to 10 seconds or this, if it is longer."""
    stall_s: PositiveFloat = 3600.0
    """How long training may wait for rollouts, or rollouts for training, before the run stops and names both."""


class RunConfig(Section):
    """Everything a run is told."""

    run: RunSection = RunSection()
    stages: tuple[Literal["pretrain", "sft", "eval", "train"], ...] = ("pretrain", "sft", "eval", "train", "eval")
    """What `etude run` does, in this order."""
    policy: PolicySection = PolicySection()
    tasks: TasksSection = TasksSection()
    environment: EnvironmentSection = EnvironmentSection()
    harness: HarnessSection = HarnessSection()
    sampling: SamplingSection = SamplingSection()
    pools: tuple[PoolSection, ...] = (PoolSection(name="local"),)
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    pretrain: PretrainSection = PretrainSection()
    sft: SftSection = SftSection()
    eval: EvalSection = EvalSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    supervision: SupervisionSection = SupervisionSection()

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        """Refuse combinations that would train on something other than what was drawn."""
        names = [pool.name for pool in self.pools]
        if not names or len(set(names)) != len(names):
            msg = "pools: at least one is needed, and each needs a name of its own"
            raise ValueError(msg)
        truncated = self.sampling.top_p < 1.0 or self.sampling.top_k > 0
        if truncated and not self.algorithm.replay_support:
            msg = (
                "algorithm.replay_support = false does not fit sampling.top_p < 1 or top_k > 0: importance ratios "
                "would be off by the kept mass. Set replay_support = true, or top_p = 1.0 and top_k = 0"
            )
            raise ValueError(msg)
        if self.algorithm.loss == "sc_mis" and not (truncated and self.algorithm.replay_support):
            msg = (
                "algorithm.loss = 'sc_mis' needs the sampler's support: set sampling.top_k or top_p < 1 with "
                "algorithm.replay_support = true, or choose loss = 'mis'"
            )
            raise ValueError(msg)
        replicas = sum(pool.replicas for pool in self.pools)
        if self.run.deterministic and (self.rollout.max_staleness > 0 or replicas > 1):
            msg = (
                f"run.deterministic does not fit rollout.max_staleness = {self.rollout.max_staleness} with {replicas} "
                "samplers: timing would decide who draws what. Set max_staleness = 0 and one pool with replicas = 1"
            )
            raise ValueError(msg)
        if self.rollout.min_survivors > self.rollout.group_size:
            msg = "rollout.min_survivors exceeds rollout.group_size"
            raise ValueError(msg)
        if self.tasks.family and self.tasks.train:
            msg = "tasks: set either family or train, not both"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _summaries_fit(self) -> "RunConfig":
        """Refuse a trigger that is met when there is no room left to write a summary."""
        trigger, context = self.harness.compaction.trigger_tokens, self.policy.shape.context
        room = max(0, context - self.sampling.max_tokens)
        if trigger > room and not self.policy.path:
            msg = (
                f"harness.compaction.trigger_tokens = {trigger} leaves no room for a summary of sampling.max_tokens = "
                f"{self.sampling.max_tokens} in policy.shape.context = {context}: set it to {room} at most, less what "
                "a tool may print"
            )
            raise ValueError(msg)
        return self
