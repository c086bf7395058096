"""The configuration of a run: typed, closed (unknown keys are refused), with a docstring per field.

Pure data, and how a mistake in it is explained: files, overrides and provenance live in `runtime.settings`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every table: frozen, and closed against unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    """Where the run lives."""

    url: str = "runs/run"
    """Run directory: a local path, or file://, s3://, gs://, az:// followed by bucket and prefix."""
    seed: int = 0
    """Every random choice of the run derives from it."""


class ShapeSection(Section):
    """Size of a policy that is made from nothing; ignored when `policy.path` is set."""

    vocab: PositiveInt = 512
    hidden: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    experts: PositiveInt = 8
    """Experts per layer; 1 makes a dense model."""
    experts_per_token: PositiveInt = 2
    expert_hidden: PositiveInt = 128
    context: PositiveInt = 1024

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
    renderer: Literal["auto", "chatml", "chatml-compact"] = "auto"
    """How messages become tokens; `auto` reads it from the model directory."""
    shape: ShapeSection = ShapeSection()


class TasksSection(Section):
    """Where problems come from: directories of Harbor tasks, or a generated family."""

    train: str = ""
    """Directory whose subdirectories are the training tasks."""
    heldout: str = ""
    """Directory whose subdirectories are the held-out tasks."""
    family: Literal["", "pyfix"] = ""
    """Generate the tasks into the run directory instead of reading them."""
    num_train: PositiveInt = 300
    num_heldout: PositiveInt = 60


class EnvironmentSection(Section):
    """Sandboxes."""

    backend: Literal["local"] = "local"
    require: tuple[str, ...] = ("process_isolated", "filesystem_isolated", "network_isolated")
    """Capabilities without which the run refuses to start; an empty list accepts whatever the host can do."""
    concurrency: PositiveInt = 16
    """Sandboxes alive at once."""


class HarnessSection(Section):
    """The agent program. It is given OPENAI_BASE_URL and OPENAI_API_KEY and knows nothing of training."""

    command: tuple[str, ...] = ("python3", "-I", "-S", "/opt/harness/mini.py", "{instruction}")
    """Program and arguments, run inside the sandbox in the task's workdir; `{instruction}` is replaced."""
    files: str = ""
    """Directory placed read-only at /opt/harness; empty: the built-in mini harness."""
    env: dict[str, str] = {}
    max_calls: PositiveInt = 12
    """Model calls per session; the next one is refused and the rollout counts as truncated."""
    max_session_tokens: PositiveInt = 4096
    """Drawn tokens per session, all calls together."""


class SamplingSection(Section):
    """The distribution that tokens are drawn from; harnesses cannot change it."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.97
    top_k: Annotated[int, Field(ge=0, le=1024)] = 64
    """0 keeps the whole vocabulary."""
    max_tokens: PositiveInt = 128
    """Per call."""


class PoolSection(Section):
    """Samplers that share engine, precision and place."""

    name: str
    engine: Literal["torch"] = "torch"
    view: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Precision in which the pool holds a version; `fp8` rounds each weight row to float8_e4m3 with a scale per row."""
    replicas: PositiveInt = 1
    max_batch: PositiveInt = 32
    """Requests decoded together."""
    threads: PositiveInt = 1


class RolloutSection(Section):
    """How attempts are played."""

    group_size: Annotated[int, Field(ge=2)] = 8
    groups_per_step: PositiveInt = 8
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Versions between the oldest weights a group may have been drawn with and those it is trained into."""
    min_survivors: Annotated[int, Field(ge=2)] = 2
    """A group with fewer scored rollouts is reported lost."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Attempts again after an infrastructure failure."""


class AlgorithmSection(Section):
    """Advantages and loss; see docs/algorithm.md."""

    loss: Literal["sc_mis", "mis", "ipo", "cispo", "tis", "grpo"] = "sc_mis"
    advantage: Literal["centred", "standardised"] = "centred"
    """`centred` uses leave-one-out for partial groups; `standardised` divides by the group's deviation."""
    mis_low: PositiveFloat = 0.5
    mis_high: PositiveFloat = 5.0
    ratio_cap: PositiveFloat = 2.0
    """Upper bound of the importance ratio in `tis`; `cispo` uses `mis_high`."""
    ipo_epsilon: PositiveFloat = 0.1
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    """Bounds of `grpo`'s clipped ratio."""
    replay_support: bool = True
    """Normalise the trainer's log-probabilities over the support that the sampler drew from."""
    replay_experts: bool = True
    """Route each token through the experts that the sampler used."""
    replay_plausibility: Fraction = 0.5
    """A replayed expert scoring below this share of the router's own weakest choice is replaced; 0 replays all."""


class OptimizerSection(Section):
    """AdamW on fp32 master weights."""

    lr: PositiveFloat = 1e-3
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    grad_clip: PositiveFloat = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0


class TrainerSection(OptimizerSection):
    """The RL stage."""

    steps: PositiveInt = 20
    row_tokens: PositiveInt = 4096
    """Tokens per packed micro-batch."""
    threads: PositiveInt = 1


class PretrainSection(OptimizerSection):
    """Next-token training on the task family's sources."""

    tokens: PositiveInt = 1_000_000
    batch_tokens: PositiveInt = 4096
    threads: PositiveInt = 2
    documents: PositiveInt = 4000
    """Source documents generated for it, none of them from a held-out task."""


class SftSection(OptimizerSection):
    """Next-token training on scripted demonstrations of mixed quality."""

    demonstrations: PositiveInt = 200
    good_share: Fraction = 0.4
    """Share of demonstrations that repair the module; the others make a typical mistake."""
    epochs: PositiveInt = 2
    batch_tokens: PositiveInt = 4096
    threads: PositiveInt = 2


class EvalSection(Section):
    """Pass rate on the held-out tasks."""

    attempts: PositiveInt = 4
    """Per task."""


class WeightsSection(Section):
    """The chain from trainer to samplers."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the published policy version; views are derived from it."""
    anchor_every: PositiveInt = 16
    """Versions between full copies; the others are differences."""
    poll_s: PositiveFloat = 0.2
    """How often samplers look at the head."""


class CheckpointSection(Section):
    """What a run resumes from."""

    every: PositiveInt = 5
    """Optimizer steps between checkpoints."""
    keep: PositiveInt = 2


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
        if self.rollout.min_survivors > self.rollout.group_size:
            msg = "rollout.min_survivors exceeds rollout.group_size"
            raise ValueError(msg)
        if self.tasks.family and self.tasks.train:
            msg = "tasks: set either family or train, not both"
            raise ValueError(msg)
        return self


Model = TypeVar("Model", bound=BaseModel)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with what a user wrote."""

    key: str
    """Dotted, such as `pools.0.view`; empty when the problem is between several keys."""
    message: str


def checked(model: type[Model], data: Mapping[str, object]) -> Model:
    """Build a model from what a TOML file holds, without turning one type into another.

    Raises:
        ValidationError: For `explain`.
    """
    # Strict and through JSON: arrays become tuples, but "5" is no number and true is not 1.
    return model.model_validate_json(json.dumps(data, default=str), strict=True)


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return every problem that pydantic found, each on one line and with the full dotted key."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        loc = item["loc"]
        key = ".".join(str(part) for part in loc)
        if item["type"] == "extra_forbidden":
            guess = suggestion(model, loc)
            message = f"unknown key; did you mean {guess}?" if guess else "unknown key"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "json_invalid":
            message = "holds text that is not UTF-8, or tables nested too deeply"
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            key = "" if key and message.startswith(key) else key
        else:
            shown = json.dumps(item["input"], default=str)
            message = f"{item['msg'].replace('Input should', 'must')}, got {shown[:60]}"
        problems.append(Problem(key=key, message=message))
    return problems


def suggestion(model: type[BaseModel], loc: Sequence[str | int]) -> str | None:
    """Return the dotted key that was probably meant by an unknown one, if any is close."""
    *above, last = loc
    section = _section_at(model, above)
    siblings = list(section.model_fields) if section else []
    if close := get_close_matches(str(last), siblings, n=1):
        return ".".join(str(part) for part in (*above, close[0]))
    everything = list(known_keys(model))
    elsewhere = [key for key in everything if key.rpartition(".")[2] == last]
    written = ".".join(str(part) for part in loc)
    return next(iter(elsewhere or get_close_matches(written, everything, n=1, cutoff=0.75)), None)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every field and table; entries of a list of tables have index 0."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if section := section_of(field.annotation):
            is_list = get_origin(field.annotation) in (tuple, list)
            yield from known_keys(section, f"{prefix}{name}.0." if is_list else f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - annotations have no common type
    """Return the table's model within a field's annotation, if the field is a table or a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def _section_at(model: type[BaseModel] | None, loc: Sequence[str | int]) -> type[BaseModel] | None:
    for part in loc:
        if model and isinstance(part, str):
            field = model.model_fields.get(part)
            model = section_of(field.annotation) if field else None
    return model
