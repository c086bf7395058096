# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Where sampler and trainer disagree about a token's probability, and what becomes of ratios and baselines."""

from functools import cache

import numpy as np
import pytest
import torch
from failure_kit import TOKENIZER, request
from msgspec.structs import replace

from etude.algorithm.advantages import centred
from etude.algorithm.corrections import correction_of
from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.algorithm.ingest import IngestRules
from etude.algorithm.losses import reinforce, score_centred
from etude.algorithm.samples import SampleRules, samples_of
from etude.config import PoolSection, RunConfig
from etude.errors import SamplerError
from etude.gateway.ingest import CompletionError, check_completion
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.learning_config import AlgorithmSection
from etude.policy.files import random_policy
from etude.policy.quantise import FP8_ROWS, dequantise, quantise
from etude.policy.shape import PolicyShape
from etude.runtime.canaries import Canaries
from etude.runtime.journal import read_log
from etude.runtime.probe_text import probe_text
from etude.runtime.probes import Prober
from etude.sampling.decode_loop import Held
from etude.sampling.engine import Forced
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.faulty import EngineFaults, FaultyEngine
from etude.sampling.sampler import EngineSampler
from etude.store.ledger_format import read_run_id
from etude.store.local import FileStore
from etude.telemetry.events import Probed, RolloutStarted
from etude.training.records import TrainerStatus
from etude.training.scoring import score
from etude.types import (
    Completion,
    FinishReason,
    Outcome,
    SamplerStatus,
    SamplingParams,
    Scored,
    ScoreRequest,
    Support,
    VersionRun,
)
from etude.weight_types import Head

WAITS = {"P-47": "adapters: the start-up probe will compare each adapter's path with the trainer's"}

TEXT = probe_text(ChatMLRenderer(TOKENIZER)).fit(160)
VOCAB = TOKENIZER.get_vocab_size()
SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, qk_norm=True,
    ffn_hidden=0, experts=4, experts_per_token=2, expert_hidden=16, norm_topk=True, max_context=256,
)  # fmt: skip


def policy(seed=0):
    made = random_policy(SHAPE, seed=seed)
    with torch.no_grad():
        for name, tensor in made.hf_tensors().items():
            if not name.endswith("norm.weight"):
                tensor.mul_(8)  # far from uniform, so that a wrong token shows
    return made


POLICY = policy()


def floats(data):
    return np.frombuffer(data, "<f4").astype(np.float64)


def draw(view="fp32", *, count=40, **params):
    """Return a prompt, and what an engine draws after it."""
    engine = TorchEngine(SHAPE, POLICY.hf_tensors(), view=view)
    asked = request("r", tuple(range(5, 25)), max_tokens=count, **params)
    engine.admit(asked)
    while not (answers := engine.step()):
        pass
    return asked, answers[0]


def scored(asked, answer, *, support):
    ids = (*asked.prompt_ids, *answer.token_ids)
    wanted = ScoreRequest(token_ids=ids, drawn_from=len(asked.prompt_ids), params=asked.params, experts=answer.experts)
    return score(POLICY, replace(wanted, support=answer.support if support else None), version=0)


@cache
def told_once(asked):
    return score(POLICY, asked, version=0)


class Trainer:
    """Scores as the trainer's service does, or without the experts that it was given."""

    def __init__(self, *, replays=True, version=0):
        self.replays, self.version = replays, version

    async def health(self):
        return TrainerStatus(step=0, version=self.version, pending_groups=0, pending_tokens=0)

    async def score(self, asked):
        told = told_once(replace(asked, exact_version=None, experts=asked.experts if self.replays else None))
        return replace(told, version=self.version)


def sampler(faults, view="fp32"):
    engine = FaultyEngine(TorchEngine(SHAPE, POLICY.hf_tensors(), view=view), faults)
    held = Held(lineage="l", version=0, digest=engine.held_digest())
    return EngineSampler(engine, sampler_id="p-0", pool="p", view=view, held=held)


def config(*pools):
    return RunConfig(pools=pools or (PoolSection(name="p"),))


async def proven(served, *, view="fp32", trainer=None):
    trainer = trainer or Trainer()
    prober = Prober(TEXT, config(PoolSection(name="p", view=view)), trainer=lambda: trainer, again_s=0.0)
    await prober.prove("p-0", served)


class Drifting:
    """A sampler whose log-probabilities are off by a gap that may grow with the version."""

    def __init__(self, pool, gap):
        self.pool, self.gap, self.version = pool, gap, 0
        self.noise = np.random.default_rng(0)

    async def status(self):
        state = {"lineage": "l", "version": self.version, "digest": "d", "held": f"d{self.version}"}
        return [SamplerStatus(sampler_id=f"{self.pool}-0", pool=self.pool, view="bf16", **state)]

    async def score(self, asked):
        told = told_once(replace(asked, exact_version=None))
        gap = self.gap(self.version) * (1 + 0.1 * self.noise.standard_normal())
        return replace(
            told, lineage="l", version=self.version, logprobs=(floats(told.logprobs) + gap).astype("<f4").tobytes()
        )


@pytest.mark.row("P-40")
async def test_a_gap_that_grows_on_one_pool_is_told_although_its_level_alarms_nobody():
    """Each pool's gap to the trainer is a series of its own, and the alarm is on its slope."""
    pools = {
        "flat": Drifting("flat", lambda version: 0.05),
        "growing": Drifting("growing", lambda version: 0.011 + 0.025 * version / 30),
    }
    notes, trainer = [], Trainer()

    class Roster:
        def serving(self):
            return pools

        def quarantine(self, name, reason):
            raise AssertionError(f"{name} {reason}")

    async def head():
        return Head(lineage="l", version=trainer.version, digest="d", anchor=0)

    sections = [PoolSection(name=name, view="bf16") for name in pools]
    watch = Canaries(
        TEXT, config(*sections), trainer=lambda: trainer, samplers=Roster(), read_head=head, note=notes.append
    )
    levels = []
    for version in range(30):
        trainer.version = version
        for one in pools.values():
            one.version = version
        await watch.look()
        metrics = watch.metrics()
        levels.append({name: metrics[f"probe/gap_nats/{name}"] for name in pools})
    # The mistake: an alarm on the level, which must be above what the other pool always has.
    assert max(level["growing"] for level in levels) < max(level["flat"] for level in levels)
    assert [note.split(" drift")[0] for note in notes] == ["the samplers of pool growing"]
    assert metrics["probe/gap_slope/growing"] > 10 * abs(metrics["probe/gap_slope/flat"])


def pushed(loss, logits, sampler_logits, *, steps=60, rate=10.0):
    """Return probabilities after training on rewards that say nothing: each prefix was lucky, whatever was drawn."""
    section = AlgorithmSection(loss=loss) if loss else AlgorithmSection(loss="mis")
    correction = correction_of(section) if loss else lambda logp, logq, advantages: torch.ones_like(logp)
    logits = logits.clone().requires_grad_()
    rows, width = logits.shape
    for _ in range(steps):
        logq = sampler_logits(logits.detach()).log_softmax(-1)
        q = logq.exp()
        drawn = torch.arange(width).repeat(rows)
        spread = logits.repeat_interleave(width, 0)
        # Every token once, weighted by its chance of being drawn: the exact expectation of the update.
        advantages = q.flatten()
        if loss == "sc_mis":
            found = score_centred(spread, drawn, logq.repeat_interleave(width, 0), advantages, correction)
        else:
            found = reinforce(spread, drawn, logq.flatten(), advantages, correction)
        (slope,) = torch.autograd.grad(found.total, logits)
        logits = (logits - rate * slope).detach().requires_grad_()
    return logits.detach().softmax(-1)


def drift(loss):
    """Return by how much (total variation, per row) a policy moves that should not move at all."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(16, 24, generator=generator)
    inputs = torch.randn(24, 8, generator=generator) / 24**0.5
    start = (weights @ inputs).T * 2
    error = (dequantise(*quantise(weights, FP8_ROWS), FP8_ROWS) - weights) @ inputs

    def quantised(logits):
        return logits + 2 * error.T

    moved = pushed(loss, start, quantised)
    return float((moved - start.softmax(-1)).abs().sum(-1).max() / 2)


@pytest.mark.row("P-41")
def test_a_quantised_sampler_does_not_pull_the_trainer_after_it():
    """With an fp8 sampler and nothing stale, no correction moves the policy for nothing; score centring never does."""
    uncorrected, default = drift(""), drift("sc_mis")
    assert uncorrected > 0.3
    assert default < 1e-4
    for loss in ("mis", "tis", "cispo"):
        assert drift(loss) < 0.1 * uncorrected, loss


@pytest.mark.row("P-42")
@pytest.mark.parametrize("top_p", [0.8, 0.97])
def test_a_replayed_support_leaves_no_kept_mass_in_the_ratio(top_p):
    """Over the sampler's own support the mean ratio is 1; over the whole vocabulary it is the kept mass."""
    asked, answer = draw(top_p=top_p, top_k=0)
    q = floats(answer.sampler_logprobs)
    whole = np.exp(floats(scored(asked, answer, support=False).logprobs) - q)
    replayed = np.exp(floats(scored(asked, answer, support=True).logprobs) - q)
    engine = TorchEngine(SHAPE, POLICY.hf_tensors())
    places = range(len(q))
    engine.admit(replace(asked, request_id="again"), Forced(token_ids=answer.token_ids, raw_draws=frozenset(places)))
    while not (answers := engine.step()):
        pass
    raw = np.exp(floats(answers[0].raw).reshape(len(q), -1))
    counts = np.frombuffer(answer.support.counts, "<u2")
    ids = np.split(np.frombuffer(answer.support.token_ids, "<u4"), np.cumsum(counts)[:-1])
    mass = np.array([row[kept].sum() for row, kept in zip(raw, ids, strict=True)])
    assert whole == pytest.approx(mass, abs=1e-3)
    assert mass.mean() < 0.5 + top_p / 2
    assert replayed.mean() == pytest.approx(1.0, abs=1e-3)
    assert np.abs(replayed - 1).max() < 1e-3
    with pytest.raises(ValueError, match="kept mass"):
        RunConfig(algorithm=AlgorithmSection(replay_support=False))


@pytest.mark.row("P-42")
def test_ratios_do_not_depend_on_what_is_evaluated_together():
    """Log-probabilities are float32 whatever is computed in one go; in bfloat16 many ratios leave the band."""
    asked, answer = draw(top_p=1.0, top_k=0, count=100)
    q = floats(answer.sampler_logprobs)
    ratios = np.exp(floats(scored(asked, answer, support=False).logprobs) - q)
    assert np.abs(ratios - 1).max() < 1e-3
    rounded = torch.tensor(q).to(torch.bfloat16).double().numpy()
    assert np.abs(np.exp(rounded - q) - 1).max() > 2e-3
    ids = (*asked.prompt_ids, *answer.token_ids)
    for cut in (30, 77, len(ids)):
        part = ScoreRequest(token_ids=ids[:cut], drawn_from=20, params=asked.params)
        alone = floats(score(POLICY, part, version=0).logprobs)
        assert alone == pytest.approx(q[: cut - 20], abs=1e-4)


@pytest.mark.row("P-43")
async def test_log_probabilities_before_temperature_and_truncation_are_refused():
    """What a token was not drawn from is not accepted as its probability: at the start, and with every answer."""
    ids, logprobs = np.arange(4, dtype="<u4"), np.log([0.4, 0.3, 0.1, 0.05]).astype("<f4")
    before = Completion(
        token_ids=(1,),
        sampler_logprobs=logprobs[1:2].tobytes(),
        versions=(VersionRun(0, 1),),
        finish_reason=FinishReason.LENGTH,
        pool="p",
        support=Support(counts=b"\4\0", token_ids=ids.tobytes(), logprobs=logprobs.tobytes()),
    )
    with pytest.raises(CompletionError, match="support_mass"):
        check_completion(request("r", max_tokens=1), before, owned_from=0)
    async with sampler(EngineFaults(temperature_ignored=True)) as served:
        with pytest.raises(SamplerError, match="does not apply the temperature"):
            await proven(served)
    async with sampler(EngineFaults()) as served:
        await proven(served)


@pytest.mark.row("P-44")
@pytest.mark.parametrize(("shift", "which"), [(1, "before"), (-1, "after")])
async def test_a_sampler_that_is_off_by_one_token_never_serves(shift, which):
    """The start-up probe recognises a shift, names it and the first token that differs; the sampler stays out."""
    for view in ("fp32", "fp8"):
        async with sampler(EngineFaults(shift=shift), view) as served:
            with pytest.raises(SamplerError, match=rf"that of the token {which}: position \d+, id \d+"):
                await proven(served, view=view)
        async with sampler(EngineFaults(), view) as served:
            await proven(served, view=view)


@pytest.mark.row("P-44")
async def test_in_a_run_every_sampler_is_proven_before_the_first_rollout(finished):
    """The ledger of a run has each sampler's proof, with its largest error, before anything was drawn."""
    store = FileStore(finished)
    log = await read_log(store, await read_run_id(store))
    facts = [fact async for fact in log.facts()]
    proofs = [fact for fact in facts if isinstance(fact, Probed)]
    first = next(place for place, fact in enumerate(facts) if isinstance(fact, RolloutStarted))
    assert {proof.sampler for proof in proofs} == {"exact-0", "rounded-0"}
    assert max(facts.index(proof) for proof in proofs) < first
    errors = {proof.sampler: proof.max_error for proof in proofs}
    assert errors["exact-0"] < 1e-4 < errors["rounded-0"]


@pytest.mark.row("P-45")
async def test_a_trainer_that_takes_routes_and_ignores_them_is_found_at_the_start():
    """The trainer reports the experts that it really used: unless they are the replayed ones, no sampler serves."""
    asked, answer = draw("fp8")
    ids = (*asked.prompt_ids, *answer.token_ids)
    wanted = ScoreRequest(token_ids=ids, drawn_from=20, params=asked.params, experts=answer.experts)
    found = score(POLICY, wanted, version=0)
    assert found.experts == answer.experts
    assert len(answer.experts.expert_ids) == 2 * (len(ids) - 1) * SHAPE.layers * SHAPE.experts_per_token
    assert found.experts_own != answer.experts
    async with sampler(EngineFaults(), "fp8") as served:
        with pytest.raises(SamplerError, match=r"used only \d+\.\d% of the experts"):
            await proven(served, view="fp8", trainer=Trainer(replays=False))


class Mirrored:
    """The mistake: right about each token of the text; two other ids are exchanged in each distribution."""

    def __init__(self, served):
        self.served = served

    async def status(self):
        return await self.served.status()

    async def score(self, asked) -> Scored:
        told = await self.served.score(asked)
        if not told.raw:
            return told
        raw = floats(told.raw).reshape(len(asked.raw_positions), -1)
        for row, position in zip(raw, asked.raw_positions, strict=True):
            others = [token for token in np.argsort(row) if token != asked.token_ids[position]]
            row[[others[0], others[-1]]] = row[[others[-1], others[0]]]
        return replace(told, raw=raw.astype("<f4").tobytes())


@pytest.mark.row("P-48")
async def test_equal_log_probabilities_of_the_tokens_do_not_pass_for_equal_distributions():
    """At some positions the whole vocabulary is compared: what agrees on the tokens only is refused."""
    async with sampler(EngineFaults()) as served:
        asked = ScoreRequest(
            token_ids=TEXT.token_ids, drawn_from=TEXT.drawn_from, params=SamplingParams(top_p=1.0, top_k=0)
        )
        on_tokens = np.abs(floats((await Mirrored(served).score(asked)).logprobs))
        assert on_tokens == pytest.approx(np.abs(floats((await Trainer().score(asked)).logprobs)), abs=1e-4)
        with pytest.raises(SamplerError, match="over the whole vocabulary"):
            await proven(Mirrored(served))


@pytest.mark.row("P-49")
def test_a_rollout_without_a_score_does_not_move_the_baseline_of_its_group():
    """Held and failed rollouts are in neither mean nor count: with rewards 1, 0, 0 left, the first is two thirds up."""
    rewards, is_left = [1.0, 1.0, 0.0, 0.0], [True, False, True, True]
    mean = sum(rewards) / 4
    mistaken = [reward - mean for reward, left in zip(rewards, is_left, strict=True) if left]
    assert mistaken == [0.5, -0.5, -0.5]
    assert centred([1.0, 0.0, 0.0], group_size=3) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    group = synthetic_group(GroupPlan(), 0)
    outcomes = [Outcome.SCORED, Outcome.HELD, Outcome.SCORED, Outcome.SCORED]
    played = zip(group.trajectories, rewards, outcomes, strict=True)
    group = replace(group, trajectories=tuple(replace(one, reward=r, outcome=how) for one, r, how in played))
    rules = SampleRules(
        algorithm=AlgorithmSection(replay_experts=False),
        ingest=IngestRules(vocab_size=1 << 20, newest_version=99),
        group_size=4,
        temperature=1.0,
        needs_support=False,
    )
    made = samples_of(group, rules)
    advantages = {sample.rollout_id: sample.advantage for sample in made.samples}
    kept = [one.rollout_id for one, left in zip(group.trajectories, is_left, strict=True) if left]
    # Of a group that lost a member: each against the mean of the others.
    assert [advantages[name] for name in kept] == pytest.approx([1.0, -0.5, -0.5])
    assert made.rewards == (1.0, 0.0, 0.0)


ARMS = torch.rand(64, generator=torch.Generator().manual_seed(9))
"""What each arm of a bandit pays on average."""


def bandits(loss, lag, *, seeds=16, steps=192, batch=32, rate=3.0):
    """Return, for each of several policies, what it earns in the end and how far (KL) it ran ahead of its draws.

    The draws are up to `lag` steps old; without a loss's name the importance weights have no bound.
    """
    generator = torch.Generator().manual_seed(0)
    correction = correction_of(AlgorithmSection(loss=loss)) if loss else lambda logp, logq, _: (logp - logq).exp()
    logits = torch.zeros(seeds, len(ARMS))
    old, furthest = logits.log_softmax(1), torch.zeros(seeds)
    for step in range(steps):
        if step % lag == 0:
            old = logits.log_softmax(1)
        drawn = torch.multinomial(old.exp(), batch, replacement=True, generator=generator)
        rewards = ARMS[drawn] + torch.randn(seeds, batch, generator=generator)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        leaf = logits.clone().requires_grad_()
        rows = leaf.repeat_interleave(batch, 0)
        if loss == "sc_mis":
            found = score_centred(rows, drawn.flatten(), old.repeat_interleave(batch, 0), advantages, correction)
        else:
            found = reinforce(rows, drawn.flatten(), old.gather(1, drawn).flatten(), advantages, correction)
        (slope,) = torch.autograd.grad(found.total / batch, leaf)
        logits = logits - rate * slope
        furthest = torch.maximum(furthest, (old.exp() * (old - logits.log_softmax(1))).sum(1))
    return (logits.softmax(1) @ ARMS).numpy(), furthest.numpy()


@pytest.mark.slow
@pytest.mark.row("P-51")
def test_bounded_weights_hold_on_stale_draws_where_plain_importance_sampling_runs_away():
    """On fresh draws all losses agree; on stale ones unbounded weights run far ahead of the data, no loss here does."""

    fresh, _ = bandits("", 1, steps=16)
    for loss in ("sc_mis", "mis", "cispo", "tis", "grpo"):
        assert bandits(loss, 1, steps=16)[0] == pytest.approx(fresh, abs=1e-3)
    earned, ahead = bandits("", 64)
    assert ahead.mean() > 3.0
    for loss in ("sc_mis", "mis", "ipo", "cispo", "tis", "grpo"):
        assert bandits(loss, 64)[1].mean() < 0.7 * ahead.mean(), loss
    bounded, near = bandits("sc_mis", 64)
    assert near.mean() < 0.4 * ahead.mean()
    assert bounded.min() > earned.min() + 0.05
