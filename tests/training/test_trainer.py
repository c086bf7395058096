# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false
import copy

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.algorithm.ingest import IngestRules
from etude.algorithm.packing import batch_of
from etude.algorithm.samples import SampleRules, samples_of
from etude.config import SamplingSection
from etude.errors import ConfigError, PolicyError, RunError, StoreError
from etude.learning_config import AlgorithmSection, TrainerSection
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.telemetry.metrics import find
from etude.training.checkpoint import POLICY_FILE, checkpoint, restore
from etude.training.gradients import add_gradients, recipe_of
from etude.training.trainer import Trainer, TrainerPlan
from etude.types import Outcome

MOE = PolicyShape(
    model_type="qwen3_moe", vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_hidden=0,
    experts=4, experts_per_token=2, expert_hidden=16, norm_topk=True, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
GROUPS = [synthetic_group(GroupPlan(expert_layers=2, pools=("fp32", "fp8"), calls=(1, 4)), seed) for seed in range(5)]
RULES = SampleRules(
    algorithm=AlgorithmSection(),
    ingest=IngestRules(vocab_size=64, newest_version=0),
    group_size=4,
    temperature=1.0,
    needs_support=True,
)

TIMINGS = {"trainer/tokens_per_s", "trainer/step_s"}


def make_trainer(*, row_tokens=4096, loss="sc_mis", steps=0, **optimizer):
    plan = TrainerPlan(
        algorithm=AlgorithmSection(loss=loss),
        trainer=TrainerSection(row_tokens=row_tokens, **optimizer),
        sampling=SamplingSection(),
        group_size=4,
    )
    trainer = Trainer(random_policy(MOE, seed=1), plan)
    for _ in range(steps):
        trainer.forward_backward(GROUPS)
        trainer.optim_step()
    return trainer


def gradients(trainer):
    return torch.cat([parameter.grad.flatten() for parameter in trainer.decoder.parameters()])


@pytest.mark.parametrize("loss", ["sc_mis", "mis", "ipo", "cispo", "tis", "grpo"])
def test_the_gradient_does_not_depend_on_packing_or_on_how_groups_arrive(loss):
    whole = make_trainer(loss=loss)
    whole.forward_backward(GROUPS)
    parts = make_trainer(loss=loss, row_tokens=40)
    for group in reversed(GROUPS):
        parts.forward_backward([group])
    expected = gradients(whole)
    assert expected.norm() > 0
    assert (gradients(parts) - expected).norm() <= 1e-6 * expected.norm()
    first, second = whole.optim_step(), parts.optim_step()
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.tokens_trained == second.tokens_trained
    for name, value in first.metrics.items():
        if name not in TIMINGS:
            assert second.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_step_is_divided_by_all_its_tokens_and_not_per_call():
    trainer = make_trainer(lr=1e-3)
    trainer.forward_backward(GROUPS[:1])
    alone = gradients(trainer).clone()
    trainer.forward_backward(GROUPS[1:])
    assert not torch.equal(alone, gradients(trainer))
    total = gradients(trainer).clone()
    tokens = sum(len(n.completion.token_ids) for g in GROUPS for t in g.trajectories for n in t.nodes)
    report = trainer.optim_step()
    assert report.tokens_trained == tokens
    assert report.metrics["trainer/grad_norm"] == pytest.approx((total / tokens).norm().item(), rel=1e-4)


def test_masking_one_rollout_leaves_the_gradients_of_the_others_alone():
    """The mask is in the numerator only: survivors do not grow when mismatch is worst."""
    first, second = samples_of(GROUPS[0], RULES).samples[:2]
    recipe = recipe_of(AlgorithmSection(loss="mis"), temperature=1.0, truncated=True)

    def gradient(samples):
        decoder = random_policy(MOE, seed=1)
        add_gradients(decoder, batch_of(samples), recipe)
        return torch.cat([parameter.grad.flatten() for parameter in decoder.parameters()])

    masked = replace(first, logq=np.full_like(first.logq, -50.0))
    torch.testing.assert_close(gradient([masked, second]), gradient([second]))


def test_versions_are_made_by_the_optimizer_step_only():
    trainer = make_trainer()
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    trainer.forward_backward(GROUPS[:2])
    assert (trainer.version, trainer.status().pending_groups) == (0, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.tensors().items())
    report = trainer.optim_step()
    assert (report.step, report.version, trainer.version, report.num_groups) == (1, 1, 1, 2)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.tensors().items())


def test_learning_raises_the_probability_of_what_was_rewarded():
    trainer = make_trainer(lr=1e-3)
    samples = [sample for group in GROUPS for sample in samples_of(group, RULES).samples]
    batch = batch_of(samples)

    def preference():
        record = add_gradients(trainer.decoder, batch, recipe_of(RULES.algorithm, temperature=1.0, truncated=True))
        trainer.optimizer.clear()
        return (record.record.log_ratio * batch.advantages).mean().item()

    before = preference()
    for _ in range(4):
        trainer.forward_backward(GROUPS)
        trainer.optim_step()
    assert preference() > before


def test_groups_without_signal_count_but_move_nothing_at_first():
    equal = [replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories)) for group in GROUPS]
    trainer = make_trainer()
    before = [parameter.clone() for parameter in trainer.decoder.parameters()]
    trainer.forward_backward(equal)
    report = trainer.optim_step()
    assert report.tokens_trained > 0
    assert report.version == 1
    assert (report.loss, report.metrics["reward/equal_groups_fraction"]) == (0.0, 1.0)
    assert all(torch.equal(p, b) for p, b in zip(trainer.decoder.parameters(), before, strict=True))


def test_a_step_without_tokens_is_refused_and_makes_no_version():
    trainer = make_trainer()
    failed = tuple(replace(t, outcome=Outcome.INFRA_ERROR, reward=None) for t in GROUPS[0].trajectories)
    trainer.forward_backward([replace(GROUPS[0], trajectories=failed)])
    with pytest.raises(RunError, match="infra_error"):
        trainer.optim_step()
    assert trainer.version == 0


def test_a_group_counts_once_per_step():
    trainer = make_trainer()
    trainer.forward_backward(GROUPS[:1])
    with pytest.raises(RunError, match="twice"):
        trainer.forward_backward(GROUPS[:1])


def test_tokens_of_versions_that_do_not_exist_yet_are_left_out():
    future = synthetic_group(GroupPlan(expert_layers=2, newest_version=7), 1)
    counted = make_trainer().forward_backward([future])
    assert counted.tokens_trained == 0
    assert sum(counted.dropped.values()) == counted.tokens_drawn


def test_a_restored_trainer_continues_bit_for_bit():
    original = make_trainer(steps=2, warmup_steps=5)
    files = checkpoint(original)
    resumed = make_trainer(warmup_steps=5)
    restore(resumed, files)
    assert (resumed.step, resumed.version) == (2, 2)
    for trainer in (original, resumed):
        trainer.forward_backward(GROUPS)
    first, second = original.optim_step(), resumed.optim_step()
    assert first.loss == second.loss
    for name in first.metrics.keys() - TIMINGS:
        assert first.metrics[name] == second.metrics[name], name
    for name, tensor in original.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name


def test_a_checkpoint_never_loses_gradients_and_never_reads_another_network():
    trainer = make_trainer(steps=1)
    files = checkpoint(trainer)
    trainer.forward_backward(GROUPS[:1])
    with pytest.raises(RunError, match="under way"):
        checkpoint(trainer)
    damaged = copy.copy(files)
    damaged[POLICY_FILE] = files[POLICY_FILE][:-1]
    with pytest.raises(StoreError, match="damaged"):
        restore(make_trainer(), damaged)
    other = Trainer(random_policy(replace(MOE, layers=1), seed=0), trainer._plan)
    with pytest.raises(StoreError, match="another network"):
        restore(other, files)


def test_parts_that_do_not_fit_are_refused_before_anything_is_trained():
    with pytest.raises(PolicyError, match="float32"):
        Trainer(random_policy(MOE, seed=0, dtype=torch.bfloat16), make_trainer()._plan)
    plan = make_trainer()._plan._replace(sampling=SamplingSection(top_p=1.0, top_k=0))
    with pytest.raises(ConfigError, match="truncated"):
        Trainer(random_policy(MOE, seed=0), plan)


def test_a_gradient_that_is_not_finite_changes_no_weight():
    trainer = make_trainer()
    trainer.forward_backward(GROUPS)
    trainer.decoder.final_norm.grad[0] = torch.nan
    before = [parameter.clone() for parameter in trainer.decoder.parameters()]
    with pytest.raises(RunError, match="not finite"):
        trainer.optim_step()
    assert trainer.version == 0
    assert all(torch.equal(p, b) for p, b in zip(trainer.decoder.parameters(), before, strict=True))


def test_the_report_locates_mismatch_by_pool_and_measures_staleness():
    trainer = make_trainer(steps=1)
    trainer.forward_backward(GROUPS)
    metrics = trainer.optim_step().metrics
    assert {"mismatch/k3/fp32", "mismatch/k3/fp8", "mismatch/k1_nats"} <= set(metrics)
    assert all(find(name) for name in metrics)
    assert metrics["staleness/max_versions"] == 1.0
    assert metrics["mismatch/k3_nats"] >= 0.0
    assert 0.0 <= metrics["router/replaced_fraction"] <= 1.0
    assert 0.0 < metrics["ratio/ess_fraction"] <= 1.0
