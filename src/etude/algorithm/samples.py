"""Finished groups as training samples: one per branch, each drawn token trainable in exactly one of them."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from etude.algorithm.advantages import centred, standardised
from etude.algorithm.branches import Branch, branches_of
from etude.algorithm.ingest import IngestRules, defect
from etude.algorithm.staleness import token_versions
from etude.learning_config import AlgorithmSection
from etude.types import WITH_REWARD, Group, Node, Trajectory


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One branch of a session with its per-token record. Arrays are dense over the L tokens of the branch.

    Outside the drawn tokens of this sample the record holds zeros, and -1 for versions, pools and experts.
    """

    rollout_id: str
    advantage: float
    token_ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Drawn tokens that this sample trains."""
    logq: NDArray[np.float32]
    versions: NDArray[np.int32]
    pools: NDArray[np.int32]
    """Index into `pool_names`."""
    pool_names: tuple[str, ...]
    support_counts: NDArray[np.int64]
    """Ids in each token's support."""
    support_ids: NDArray[np.int64]
    support_logq: NDArray[np.float32]
    experts: NDArray[np.int16] | None = None
    """i16[L, layers, top_k]."""


class TokenAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Where the drawn tokens went: trained + masked + dropped = drawn."""

    drawn: int = 0
    trained: int = 0
    masked: dict[str, int] = {}
    """Part of a sample, without a loss, by reason."""
    dropped: dict[str, int] = {}
    """Not part of any sample, by reason."""

    def __add__(self, other: "TokenAccount") -> "TokenAccount":
        """Return both accounts together."""
        return TokenAccount(
            drawn=self.drawn + other.drawn,
            trained=self.trained + other.trained,
            masked=dict(Counter(self.masked) + Counter(other.masked)),
            dropped=dict(Counter(self.dropped) + Counter(other.dropped)),
        )


class GroupSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What a group gives the trainer."""

    samples: tuple[Sample, ...]
    account: TokenAccount
    rewards: tuple[float, ...]
    """Of the rollouts in the baseline."""


class SampleRules(msgspec.Struct, frozen=True, kw_only=True):
    """How groups become samples."""

    algorithm: AlgorithmSection
    ingest: IngestRules
    group_size: int
    """Attempts per task when none is lost."""
    temperature: float
    needs_support: bool
    """Tokens were drawn from a truncated distribution, so that one of unknown support cannot be trained on."""


def samples_of(group: Group, rules: SampleRules) -> GroupSamples:
    """Return the samples of the group's graded rollouts, and an account of every token that was drawn."""
    account = TokenAccount()
    graded: list[Trajectory] = []
    for trajectory in group.trajectories:
        reason = _reason_left_out(trajectory, rules.ingest)
        if reason:
            account += _dropped(trajectory.nodes, reason)
        else:
            graded.append(trajectory)
    rewards = [trajectory.reward for trajectory in graded if trajectory.reward is not None]
    if len(rewards) <= 1:
        for trajectory in graded:
            account += _dropped(trajectory.nodes, "no_baseline")
        return GroupSamples(samples=(), account=account, rewards=())
    if rules.algorithm.advantage == "standardised":
        advantages = standardised(rewards)
    else:
        advantages = centred(rewards, group_size=rules.group_size)
    samples: list[Sample] = []
    for trajectory, advantage in zip(graded, advantages, strict=True):
        tree = branches_of(trajectory.nodes)
        account += _dropped(tree.superseded, "superseded")
        account += _dropped(tree.auxiliary, "auxiliary")
        for branch in tree.branches:
            sample, counted = _sample(trajectory.rollout_id, branch, advantage, rules)
            account += counted
            if counted.trained:
                samples.append(sample)
    return GroupSamples(samples=tuple(samples), account=account, rewards=tuple(rewards))


def _reason_left_out(trajectory: Trajectory, ingest: IngestRules) -> str:
    if trajectory.outcome not in WITH_REWARD:
        return trajectory.outcome.value
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return "reward_missing"
    return defect(trajectory, ingest)


def _dropped(nodes: Sequence[Node], reason: str) -> TokenAccount:
    drawn = sum(len(node.completion.token_ids) for node in nodes)
    return TokenAccount(drawn=drawn, dropped={reason: drawn} if drawn else {})


def _sample(rollout_id: str, branch: Branch, advantage: float, rules: SampleRules) -> tuple[Sample, TokenAccount]:
    record = _Record(sum(len(node.prompt_ids) + len(node.completion.token_ids) for node in branch.nodes), rules)
    for node in branch.nodes:
        record.append(node, owned=node.node_id in branch.owned)
    return record.sample(rollout_id, advantage), record.account()


class _Record:
    """The arrays of one sample while its branch is walked."""

    def __init__(self, length: int, rules: SampleRules) -> None:
        self.rules = rules
        self.length = 0
        self.token_ids = np.zeros(length, dtype=np.int64)
        self.trained = np.zeros(length, dtype=np.bool_)
        self.logq = np.zeros(length, dtype=np.float32)
        self.versions = np.full(length, -1, dtype=np.int32)
        self.pools = np.full(length, -1, dtype=np.int32)
        self.pool_names: list[str] = []
        self.support_counts = np.zeros(length, dtype=np.int64)
        self.support_ids: list[NDArray[np.int64]] = []
        self.support_logq: list[NDArray[np.float32]] = []
        layers = rules.ingest.expert_layers
        shape = (length, layers, rules.ingest.experts_per_token)
        self.experts = np.full(shape, -1, dtype=np.int16) if layers else None
        self.drawn = 0
        self.masked: Counter[str] = Counter()

    def append(self, node: Node, *, owned: bool) -> None:
        """Take over a node's tokens; those of a node owned by another sample are context only."""
        start = self.length + len(node.prompt_ids)
        end = start + len(node.completion.token_ids)
        self.token_ids[self.length : start] = node.prompt_ids
        self.token_ids[start:end] = node.completion.token_ids
        self.length = end
        experts = node.completion.experts
        if self.experts is not None and experts is not None:
            rows = np.frombuffer(experts.expert_ids, "<u2").reshape(-1, *self.experts.shape[1:])
            self.experts[experts.start : experts.start + len(rows)] = rows
        if owned:
            self._record_drawn(node, slice(start, end))

    def _record_drawn(self, node: Node, place: slice) -> None:
        completion = node.completion
        self.drawn += len(completion.token_ids)
        self.logq[place] = np.frombuffer(completion.sampler_logprobs, "<f4")
        self.versions[place] = token_versions(completion.versions)
        if completion.pool not in self.pool_names:
            self.pool_names.append(completion.pool)
        self.pools[place] = self.pool_names.index(completion.pool)
        support = completion.support
        if support is not None:
            self.support_counts[place] = np.frombuffer(support.counts, "<u2")
            self.support_ids.append(np.frombuffer(support.token_ids, "<u4").astype(np.int64))
            self.support_logq.append(np.frombuffer(support.logprobs, "<f4"))
        if self.rules.temperature == 0.0:
            self.masked["temperature_zero"] += len(completion.token_ids)
            return
        known = self.support_counts[place] > 0
        self.trained[place] = known | (not self.rules.needs_support)
        self.masked["support_unknown"] += len(completion.token_ids) - int(self.trained[place].sum())

    def account(self) -> TokenAccount:
        """Return where this sample's own tokens went."""
        return TokenAccount(drawn=self.drawn, trained=int(self.trained.sum()), masked=dict(+self.masked))

    def sample(self, rollout_id: str, advantage: float) -> Sample:
        """Return the finished sample."""
        return Sample(
            rollout_id=rollout_id,
            advantage=advantage,
            token_ids=self.token_ids,
            trained=self.trained,
            logq=self.logq,
            versions=self.versions,
            pools=self.pools,
            pool_names=tuple(self.pool_names),
            support_counts=self.support_counts,
            support_ids=np.concatenate([*self.support_ids, np.zeros(0, dtype=np.int64)]),
            support_logq=np.concatenate([*self.support_logq, np.zeros(0, dtype=np.float32)]),
            experts=self.experts,
        )
