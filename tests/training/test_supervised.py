# pyright: basic
import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from etude.learning_config import OptimizerSection
from etude.policy.files import random_policy
from etude.policy.initial import initial_policy
from etude.policy.shape import PolicyShape
from etude.training.muon import Muon, orthogonalised
from etude.training.supervised import Document, rows_of, train_supervised

SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=20, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_hidden=32,
    experts=4, experts_per_token=2, expert_hidden=16, norm_topk=True, qk_norm=True, max_context=64,
)  # fmt: skip


def document(*ids, learned=True):
    return Document(list(ids), [learned] * len(ids))


def train(decoder, rows, lr=0.02):
    steps = []
    train_supervised(decoder, rows, OptimizerSection(lr=lr), on_step=steps.append)
    return steps


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 8, 16)])
def test_an_orthogonalised_matrix_keeps_its_directions_and_has_singular_values_about_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(orthogonalised(matrices), full_matrices=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    nearest = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(
        (left @ right).flatten(), (nearest[0] @ nearest[2]).flatten(), dim=0
    ) == pytest.approx(1.0, abs=1e-4)


def test_a_stack_is_orthogonalised_matrix_by_matrix():
    stack = torch.randn((3, 8, 16), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(orthogonalised(stack), torch.stack([orthogonalised(matrix) for matrix in stack]), atol=1e-5)


def test_muon_moves_against_the_gradient_and_clears_it():
    used, unused = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.ones(4, 8))
    target = torch.randn((4, 8), generator=torch.Generator().manual_seed(0))
    muon = Muon([used, unused])
    distances = []
    for _ in range(20):
        loss = (used - target).square().sum()
        loss.backward()
        distances.append(loss.item())
        muon.step(0.1)
        assert used.grad is None
    assert distances[-1] < 0.5 * distances[0]
    assert torch.equal(unused, torch.ones(4, 8))


def test_the_loss_starts_at_a_uniform_guess_and_falls():
    rows = [[document(*range(20)), document(*range(10, 20), *range(10))]] * 60
    steps = train(initial_policy(SHAPE, 0), rows)
    assert steps[0].loss == pytest.approx(math.log(20), rel=1e-3)
    assert steps[-1].loss < 0.5
    assert [step.step for step in steps] == list(range(1, 61))
    assert {(step.num_steps, step.tokens) for step in steps} == {(60, 40)}


def test_the_loss_does_not_depend_on_what_is_packed_together():
    one, two = document(1, 2, 3, 4, 5), document(9, 8, 7)
    together = train(random_policy(SHAPE, seed=1), [[one, two]])[0].loss
    alone = [train(random_policy(SHAPE, seed=1), [[each]])[0].loss for each in (one, two)]
    assert together == pytest.approx((4 * alone[0] + 2 * alone[1]) / 6, rel=1e-5)


def test_tokens_that_are_not_to_be_learned_are_read_but_have_no_loss():
    ids = [1, 2, 3, 4, 5, 6]
    prompt, answer = [False] * 4, [True] * 2
    all_of_it = train(random_policy(SHAPE, seed=1), [[document(*ids)]])[0].loss
    answer_only = train(random_policy(SHAPE, seed=1), [[Document(ids, prompt + answer)]])[0].loss
    prompt_only = train(random_policy(SHAPE, seed=1), [[Document(ids, [True] * 4 + [False] * 2)]])[0].loss
    assert 5 * all_of_it == pytest.approx(2 * answer_only + 3 * prompt_only, rel=1e-5)


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 40), st.integers())
def test_an_epoch_has_every_document_once_and_only_a_lone_document_exceeds_the_budget(sizes, budget, seed):
    documents = [document(*([number] * size)) for number, size in enumerate(sizes)]
    rows = list(rows_of(documents, batch_tokens=budget, random=Random(seed)))
    assert sorted(one.token_ids[0] for row in rows for one in row) == list(range(len(sizes)))
    assert all(len(row) == 1 or sum(len(one.token_ids) for one in row) <= budget for row in rows)
