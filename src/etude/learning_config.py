"""How a policy learns: the tables of a run's configuration that algorithm, trainer and stages read."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every table: frozen, and closed against unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class AlgorithmSection(Section):
    """Advantages and loss; see docs/algorithm.md."""

    loss: Literal["sc_mis", "mis", "ipo", "cispo", "tis", "grpo"] = "sc_mis"
    """How log-probabilities and advantages become a loss."""
    advantage: Literal["centred", "standardised"] = "centred"
    """`centred` uses leave-one-out for partial groups; `standardised` divides by the group's deviation."""
    mis_low: PositiveFloat = 0.5
    """Tokens whose importance ratio is below it are masked in `mis` and `sc_mis`."""
    mis_high: PositiveFloat = 5.0
    """Tokens whose importance ratio is above it are masked in `mis` and `sc_mis`."""
    ratio_cap: PositiveFloat = 2.0
    """Upper bound of the importance ratio in `tis`; `cispo` uses `mis_high`."""
    ipo_epsilon: PositiveFloat = 0.1
    """Tokens whose probability differs by more between trainer and sampler are masked in `ipo`."""
    clip_low: PositiveFloat = 0.2
    """How far below 1 the ratio of `grpo` may fall before it is clipped."""
    clip_high: PositiveFloat = 0.28
    """How far above 1 it may rise."""
    replay_support: bool = True
    """Normalise the trainer's log-probabilities over the support that the sampler drew from."""
    replay_experts: bool = True
    """Route each token through the experts that the sampler used."""
    replay_plausibility: Fraction = 0.5
    """A replayed expert scoring below this share of the router's own weakest choice is replaced; 0 replays all."""


class OptimizerSection(Section):
    """AdamW on fp32 master weights."""

    lr: PositiveFloat = 1e-3
    """Learning rate after the warm-up."""
    beta1: Fraction = 0.9
    """Decay of the mean of gradients."""
    beta2: Fraction = 0.98
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean of squared gradients."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Share of a weight that one step takes away, times `lr`."""
    grad_clip: PositiveFloat = 1.0
    """Longest gradient, as an L2 norm over all tensors."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly."""


class TrainerSection(OptimizerSection):
    """The RL stage."""

    steps: PositiveInt = 20
    """Optimizer steps of the run."""
    final_lr_share: Fraction = 1.0
    """Share of the learning rate that is left at the last step; it falls on a line from the first one."""
    row_tokens: PositiveInt = 4096
    """Tokens per packed micro-batch."""
    threads: PositiveInt = 1
    """CPU threads."""


class PretrainSection(OptimizerSection):
    """Next-token training on the task family's sources."""

    tokens: PositiveInt = 1_000_000
    """Tokens to train on."""
    batch_tokens: PositiveInt = 4096
    """Tokens of one optimizer step."""
    threads: PositiveInt = 1
    """CPU threads."""
    documents: PositiveInt = 4000
    """Source documents generated for it, none of them from a held-out task."""


class SftSection(OptimizerSection):
    """Next-token training on scripted demonstrations of mixed quality."""

    demonstrations: PositiveInt = 200
    """Scripted sessions to train on."""
    good_share: Fraction = 0.4
    """Share of demonstrations that do the task well; the others make a typical mistake."""
    epochs: PositiveInt = 2
    """Times that each is trained on."""
    batch_tokens: PositiveInt = 4096
    """Tokens of one optimizer step."""
    threads: PositiveInt = 1
    """CPU threads."""
