"""The policy while it learns: groups in, versions out."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from etude.algorithm.diagnostics import TokenRecord, diagnose, joined
from etude.algorithm.ingest import IngestRules
from etude.algorithm.packing import MicroBatch, pack, sample_cost
from etude.algorithm.samples import GroupSamples, SampleRules, TokenAccount, samples_of
from etude.config import SamplingSection
from etude.errors import RunError
from etude.learning_config import AlgorithmSection, TrainerSection
from etude.policy.decoder import Decoder
from etude.policy.shape import PolicyShape
from etude.telemetry.events import TrainedGroup
from etude.training.gradients import add_gradients, recipe_of
from etude.training.optimizer import Optimizer
from etude.training.records import Accumulated, TrainerStatus
from etude.training.scoring import score
from etude.types import Group, Scored, ScoreRequest, StepReport

_MASKS = {"sc_mis": "mis", "grpo": "clip"}
"""What a loss's correction is called in the reasons for masked tokens, where that is not the loss's own name."""


class TrainerPlan(NamedTuple):
    """The parts of a run's configuration that decide what a step computes."""

    algorithm: AlgorithmSection
    trainer: TrainerSection
    sampling: SamplingSection
    group_size: int
    """Attempts per task when none is lost."""


class Trainer:
    """Accumulates gradients over groups as they become ready, and makes a new policy version per optimizer step.

    Not thread-safe: one thread calls it.
    """

    def __init__(self, decoder: Decoder, plan: TrainerPlan, *, step: int = 0, version: int = 0) -> None:
        """Train `decoder` in place; its weights are policy version `version`, after `step` optimizer steps."""
        self.decoder = decoder
        self.optimizer = Optimizer(decoder, plan.trainer)
        self.step = step
        self.version = version
        self._plan = plan
        truncated = plan.sampling.top_p < 1.0 or plan.sampling.top_k > 0
        self._recipe = recipe_of(plan.algorithm, temperature=plan.sampling.temperature, truncated=truncated)
        self._cost = sample_cost(*_cost_terms(decoder.shape))
        self._mask = _MASKS.get(plan.algorithm.loss, plan.algorithm.loss)
        self._pending = _Pending()
        self.made: tuple[TrainedGroup, ...] = ()
        """What became of the tokens of the last step's groups, in the order in which they came."""

    def status(self) -> TrainerStatus:
        """Return where the trainer stands."""
        return TrainerStatus(
            step=self.step,
            version=self.version,
            pending_groups=len(self._pending.group_ids),
            pending_tokens=self._pending.account.trained,
        )

    def forward_backward(self, groups: Sequence[Group]) -> Accumulated:
        """Add the gradients of these groups to the step under way.

        They stay sums until `optim_step` divides by the step's token count, so that it does not matter how a step's
        groups are spread over calls.

        Raises:
            RunError: A group is in this step already; training on it again would count it twice.
        """
        started = time.perf_counter()
        pending = self._pending
        repeated = [group.group_id for group in groups if group.group_id in pending.group_ids]
        if repeated or len({group.group_id for group in groups}) < len(groups):
            raise RunError(f"a group was sent twice for step {self.step + 1}: {repeated or 'within one call'}")
        made = [samples_of(group, self._rules()) for group in groups]
        # No gradient can come of an advantage of 0; its tokens count, its forward pass would be for nothing.
        # Packed group by group: what a correction masks is known per row, and is accounted for per group.
        for group, samples in zip(groups, made, strict=True):
            moving = [sample for sample in samples.samples if sample.advantage]
            batches = pack(moving, row_tokens=self._plan.trainer.row_tokens, cost=self._cost)
            masked = sum((self._add(batch) for batch in batches), Counter[str]())
            pending.groups.append(_trained_group(group, samples.account, masked))
        account = sum((group.account for group in made), TokenAccount())
        num_samples = sum(len(group.samples) for group in made)
        pending.take(groups, made)
        seconds = time.perf_counter() - started
        pending.seconds += seconds
        return Accumulated(
            num_groups=len(groups),
            num_samples=num_samples,
            tokens_drawn=account.drawn,
            tokens_trained=account.trained,
            masked=account.masked,
            dropped=account.dropped,
            seconds=seconds,
        )

    def optim_step(self) -> StepReport:
        """Update the weights once with everything accumulated: the only place where a policy version is made.

        Raises:
            RunError: There is no token to train on, or the gradient is not finite; the weights are as they were.
        """
        started = time.perf_counter()
        pending = self._pending
        trained = pending.account.trained
        if not trained:
            raise RunError(
                f"step {self.step + 1} has no token to train on ({pending.account.dropped or 'no groups were sent'}); "
                "look at the rollouts' outcomes"
            )
        self._pending = _Pending()
        self.made = tuple(pending.groups)
        norm = self.optimizer.update(step=self.step + 1, divisor=float(trained))
        self.step += 1
        self.version += 1
        loss = pending.loss_sum / trained
        seconds = pending.seconds + time.perf_counter() - started
        metrics = pending.metrics(version=self.version - 1) | {
            "trainer/loss": loss,
            "trainer/grad_norm": norm,
            "trainer/lr": self.optimizer.rate(self.step),
            "trainer/tokens_per_s": pending.row_tokens / seconds,
            "trainer/step_s": seconds,
        }
        return StepReport(
            step=self.step,
            version=self.version,
            loss=loss,
            num_groups=len(pending.group_ids),
            num_samples=pending.num_samples,
            tokens_trained=trained,
            metrics=metrics,
            seconds=seconds,
        )

    def score(self, request: ScoreRequest) -> Scored:
        """Return what the weights as they are think of given tokens; the step under way is not touched.

        Raises:
            RunError: The request does not hold together.
        """
        return score(self.decoder, request, version=self.version)

    def discard(self) -> None:
        """Forget the step under way."""
        self._pending = _Pending()
        self.optimizer.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name, as views: copy them before the next step."""
        return self.decoder.hf_tensors()

    def _rules(self) -> SampleRules:
        shape = self.decoder.shape
        replays = self._plan.algorithm.replay_experts and shape.is_moe
        return SampleRules(
            algorithm=self._plan.algorithm,
            ingest=IngestRules(
                vocab_size=shape.vocab_size,
                newest_version=self.version,
                expert_layers=shape.layers if replays else 0,
                experts_per_token=shape.experts_per_token,
                num_experts=shape.experts,
            ),
            group_size=self._plan.group_size,
            temperature=self._plan.sampling.temperature,
            needs_support=self._recipe.on_support,
        )

    def _add(self, batch: MicroBatch) -> Counter[str]:
        """Add a micro-batch's gradients, and return how many of its tokens the correction masked, by reason."""
        result = add_gradients(self.decoder, batch, self._recipe)
        pending = self._pending
        pending.row_tokens += len(batch.token_ids)
        pending.loss_sum += result.loss_sum
        pending.replaced += result.replaced
        pending.replayed += result.replayed
        pending.records.append(result.record._replace(pools=pending.pool_ids(batch)))
        masked = result.record.weight == 0
        low = int((masked & (result.record.log_ratio < 0)).sum())
        return Counter({f"{self._mask}_low": low, f"{self._mask}_high": int(masked.sum()) - low})


class _Pending:
    """Sums of the step under way; the gradients themselves are in the parameters."""

    def __init__(self) -> None:
        self.group_ids: set[str] = set()
        self.groups: list[TrainedGroup] = []
        self.account = TokenAccount()
        self.num_samples = 0
        self.row_tokens = 0
        self.rewards: list[tuple[float, ...]] = []
        self.loss_sum = 0.0
        self.replaced = 0
        self.replayed = 0
        self.records: list[TokenRecord] = []
        self.pools: list[str] = []
        self.seconds = 0.0

    def take(self, groups: Sequence[Group], made: Sequence[GroupSamples]) -> None:
        """Count groups whose gradients were added."""
        self.group_ids |= {group.group_id for group in groups}
        for group in made:
            self.account += group.account
            self.num_samples += len(group.samples)
            self.rewards.append(group.rewards)

    def pool_ids(self, batch: MicroBatch) -> Tensor:
        """Return the batch's pools as indices into this step's names."""
        self.pools += [name for name in batch.pool_names if name not in self.pools]
        return torch.tensor([self.pools.index(name) for name in batch.pool_names])[batch.pools]

    def metrics(self, *, version: int) -> dict[str, float]:
        """Return the step's metrics."""
        rewards = [reward for group in self.rewards for reward in group]
        equal = [group for group in self.rewards if len(set(group)) == 1]
        metrics = diagnose(joined(self.records), version=version, pool_names=self.pools) if self.records else {}
        metrics |= {f"tokens/masked_{reason}": float(count) for reason, count in self.account.masked.items()}
        metrics |= {f"tokens/dropped_{reason}": float(count) for reason, count in self.account.dropped.items()}
        if self.replayed:
            metrics["router/replaced_fraction"] = self.replaced / self.replayed
        return metrics | {
            "tokens/drawn": float(self.account.drawn),
            "tokens/trained": float(self.account.trained),
            "trainer/groups_count": float(len(self.group_ids)),
            "trainer/samples_count": float(self.num_samples),
            "reward/mean": sum(rewards) / len(rewards),
            "reward/equal_groups_fraction": len(equal) / len(self.rewards),
        }


def _trained_group(group: Group, account: TokenAccount, masked: Counter[str]) -> TrainedGroup:
    """Return a group's account in which tokens that the correction masked are not counted as trained."""
    return TrainedGroup(
        group=group.group_id,
        drawn=account.drawn,
        trained=account.trained - masked.total(),
        masked=dict(+(Counter(account.masked) + masked)),
        dropped=account.dropped,
    )


def _cost_terms(shape: PolicyShape) -> tuple[float, float]:
    """Return multiply-adds per token, and per pair of tokens, of a forward pass."""
    attention = shape.heads * shape.head_dim
    inner = shape.experts_per_token * shape.expert_hidden or shape.ffn_hidden
    linear = shape.hidden * (2 * attention + 2 * shape.kv_heads * shape.head_dim + 3 * inner)
    return float(shape.layers * linear), float(shape.layers * attention)
