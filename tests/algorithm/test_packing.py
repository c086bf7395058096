# pyright: basic, reportOptionalMemberAccess=false
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.algorithm.ingest import IngestRules
from etude.algorithm.packing import batch_of, pack, rows_of, sample_cost
from etude.algorithm.samples import SampleRules, samples_of
from etude.learning_config import AlgorithmSection

COST = sample_cost(1.0, 0.01)
RULES = SampleRules(
    algorithm=AlgorithmSection(),
    ingest=IngestRules(vocab_size=64, newest_version=0, expert_layers=2, experts_per_token=2, num_experts=4),
    group_size=4,
    temperature=1.0,
    needs_support=True,
)


def samples(seed):
    return samples_of(synthetic_group(GroupPlan(expert_layers=2, pools=("a", "b")), seed), RULES).samples


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 80))
def test_each_sample_is_in_one_row_and_no_row_overflows_that_could_be_split(lengths, row_tokens):
    rows = rows_of(lengths, row_tokens=row_tokens, cost=COST)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[index] for index in row) <= row_tokens


def test_rows_share_the_cost_of_attention_and_not_just_tokens():
    rows = rows_of([100, 100, 50, 50, 50, 50], row_tokens=210, cost=sample_cost(0.0, 1.0))
    assert len(rows) == 2
    assert {sum(1 for index in row if index < 2) for row in rows} == {1}


@given(st.integers(0, 100))
def test_targets_are_predicted_from_the_token_before_them_in_the_same_segment(seed):
    made = samples(seed)
    batch = batch_of(made)
    starts = np.array(batch.boundaries)
    row = 0
    for number, sample in enumerate(made):
        for position in np.flatnonzero(sample.trained):
            source = int(batch.sources[row])
            assert starts[number] <= source < starts[number + 1]
            assert source - starts[number] == position - 1 == int(batch.positions[source])
            assert int(batch.token_ids[source]) == sample.token_ids[position - 1]
            assert int(batch.drawn[row]) == sample.token_ids[position]
            assert float(batch.logq[row]) == sample.logq[position]
            row += 1
    assert row == len(batch.sources)


@given(st.integers(0, 100))
def test_supports_and_pools_stay_with_their_tokens(seed):
    made = samples(seed)
    batch = batch_of(made)
    hits = (batch.support == batch.drawn[:, None]).nonzero()
    assert hits[:, 0].tolist() == list(range(len(batch.drawn)))
    torch.testing.assert_close(batch.support_logq[hits[:, 0], hits[:, 1]], batch.logq)
    torch.testing.assert_close(batch.support_logq.exp().sum(1), torch.ones(len(batch.drawn)), atol=1e-5, rtol=0)
    names = [name for s in made for name in np.array(s.pool_names)[s.pools[s.trained]]]
    assert [batch.pool_names[index] for index in batch.pools] == names


def test_a_step_is_packed_without_losing_a_trained_token():
    made = [sample for seed in range(6) for sample in samples(seed)]
    batches = pack(made, row_tokens=64, cost=COST)
    assert sum(len(batch.drawn) for batch in batches) == sum(int(sample.trained.sum()) for sample in made)
    assert all(batch.boundaries[-1] <= 64 for batch in batches)
    assert all(batch.replay.shape == (len(batch.token_ids), 2, 2) for batch in batches)
