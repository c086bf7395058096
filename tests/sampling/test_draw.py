# pyright: basic
"""The drawing rules: truncation, renormalisation and the counter-based numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.sampling.engines.torch_draw import Rules, draw, most_likely, uniforms


def rules(rows, temperature=1.0, top_k=64, top_p=0.97):
    return Rules(torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p))


def numbers(rows, seed=0):
    return torch.from_numpy(uniforms(np.arange(rows, dtype=np.uint64) + np.uint64(seed), np.zeros(rows, np.uint64)))


def reference(logits, temperature, top_k, top_p):
    """The distribution, the slow way, in float64."""
    scores = logits.double() / temperature
    order = scores.argsort(descending=True, stable=True)[: min(top_k, len(logits))]
    probs = scores[order].softmax(0)
    keep, mass = [], 0.0
    for token, prob in zip(order.tolist(), probs.tolist(), strict=True):
        if mass >= top_p:
            break
        keep.append(token)
        mass += prob
    keep.sort()
    return keep, scores[keep].log_softmax(0)


@given(st.integers(0, 2**32), st.integers(1, 100), st.floats(0.3, 2.0), st.sampled_from([0.1, 0.5, 0.9, 0.97, 1.0]))
def test_supports_and_logprobs_equal_a_slow_reference(seed, top_k, temperature, top_p):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(seed)) * 3
    drawn = draw(logits, rules(3, temperature, top_k, top_p), numbers(3, seed))
    if top_k >= 100 and top_p >= 1.0:
        assert drawn.counts.tolist() == [0, 0, 0]
        return
    start = 0
    for row in range(3):
        keep, logprobs = reference(logits[row], temperature, top_k, top_p)
        end = start + int(drawn.counts[row])
        ids = drawn.support_ids[start:end].tolist()
        if len(keep) == len(ids):  # a mass within rounding of top_p may fall on either side
            assert ids == keep
            torch.testing.assert_close(drawn.support_logprobs[start:end].double(), logprobs, atol=1e-5, rtol=0)
        assert abs(len(keep) - len(ids)) <= 1
        assert drawn.logprobs[row] == drawn.support_logprobs[start:end][ids.index(int(drawn.tokens[row]))]
        start = end


def test_tokens_are_drawn_as_often_as_their_recorded_probability_says():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]]).repeat(20_000, 1)
    drawn = draw(logits, rules(20_000, top_k=4, top_p=1.0), numbers(20_000))
    shares = torch.bincount(drawn.tokens, minlength=5) / 20_000
    wanted = torch.zeros(5)
    wanted[:4] = logits[0, :4].softmax(0)
    torch.testing.assert_close(shares, wanted, atol=0.012, rtol=0)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(64, 30_000))
def test_the_grouped_selection_equals_a_sort(seed, count, vocab):
    scores = torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed))
    values, ids = most_likely(scores, min(count, vocab))
    wanted = scores.sort(dim=1, descending=True)
    torch.testing.assert_close(values, wanted.values[:, : values.shape[1]])
    torch.testing.assert_close(scores.gather(1, ids), values)


def test_an_unlimited_top_k_keeps_the_nucleus_of_the_whole_vocabulary():
    logits = torch.zeros(2, 5000)
    logits[1, 7] = 20.0
    drawn = draw(logits, rules(2, top_k=5000, top_p=0.5), numbers(2))
    assert abs(int(drawn.counts[0]) - 2500) <= 1
    assert int(drawn.counts[1]) == 1
    assert int(drawn.tokens[1]) == 7


def test_a_batch_may_mix_rules_and_each_row_is_drawn_as_if_alone():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    mixed = Rules(
        torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0]),
        torch.tensor([1, 10, 300, 300, 64]),
        torch.tensor([1.0, 0.9, 1.0, 0.8, 0.97]),
    )
    drawn = draw(logits, mixed, numbers(5))
    edges = [0, *drawn.counts.cumsum(0).tolist()]
    for row in range(5):
        alone = draw(logits[row : row + 1], Rules(*(rule[row : row + 1] for rule in mixed)), numbers(5)[row : row + 1])
        assert int(alone.tokens[0]) == int(drawn.tokens[row])
        assert float(alone.logprobs[0]) == pytest.approx(float(drawn.logprobs[row]), abs=1e-6)
        assert alone.support_ids.tolist() == drawn.support_ids[edges[row] : edges[row + 1]].tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("top_k", "top_p"), [(64, 0.97), (512, 1.0), (512, 0.9)])
def test_logits_that_are_not_numbers_are_not_sound(bad, top_k, top_p):
    logits = torch.zeros(2, 512)
    logits[1, 100] = bad
    assert draw(logits, rules(2, top_k=top_k, top_p=top_p), numbers(2)).sound.tolist() == [True, False]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_a_number_depends_on_its_seed_and_index_alone_and_lies_below_one(seed, index):
    one = uniforms(np.array([seed], np.uint64), np.array([index], np.uint64))
    many = uniforms(np.array([5, seed, 9], np.uint64), np.array([1, index, 3], np.uint64))
    assert one[0] == many[1]
    assert 0 <= one[0] < 1


def test_numbers_are_uniform_over_seeds_and_over_indices():
    count = 20_000
    for seeds, indices in ((np.arange(count), np.zeros(count)), (np.zeros(count), np.arange(count))):
        values = uniforms(seeds.astype(np.uint64), indices.astype(np.uint64))
        histogram = np.histogram(values, 20, (0, 1))[0]
        assert abs(histogram - count / 20).max() < 5 * (count / 20) ** 0.5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
