# pyright: basic
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.policy.views import round_rows_to_e4m3, to_view

SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=50, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_hidden=0,
    experts=4, experts_per_token=2, expert_hidden=8, qk_norm=True,
)  # fmt: skip
ROWS = st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4), min_size=1, max_size=6)


def scales(weights):
    return (weights.abs().amax(dim=1, keepdim=True) / 448).clamp(min=2.0**-126)


@given(ROWS)
@example([[0.0, 0.0, 0.0, 2.0**-149]])
@example([[0.0, -0.0, 2.0**-130, 2.0**-128]])
def test_fp8_keeps_each_value_within_a_sixteenth_or_a_tiny_step_of_its_row(rows):
    weights = torch.tensor(rows)
    rounded = round_rows_to_e4m3(weights)
    step = scales(weights) * 2.0**-10  # half the smallest e4m3 number
    assert bool(((rounded - weights).abs() <= weights.abs() / 16 * (1 + 1e-5) + step * (1 + 1e-5)).all())


@given(ROWS)
def test_a_row_is_rounded_the_same_whatever_rows_are_beside_it(rows):
    weights = torch.tensor(rows)
    whole = round_rows_to_e4m3(weights)
    for index, row in enumerate(weights):
        assert torch.equal(round_rows_to_e4m3(row[None])[0], whole[index])


@given(ROWS)
@example([[0.0, 0.0, 0.0, 2.0**-126.5]])
def test_a_row_has_no_more_values_than_e4m3(rows):
    weights = torch.tensor(rows)
    codes = round_rows_to_e4m3(weights) / scales(weights)
    torch.testing.assert_close(codes, codes.clamp(-448, 448).to(torch.float8_e4m3fn).float(), rtol=1e-6, atol=1e-9)


def test_views_change_linear_layers_only_and_only_where_they_must():
    for name, tensor in random_policy(SHAPE, seed=0).hf_tensors().items():
        fp8 = to_view(name, tensor, "fp8")
        is_linear = name.endswith("_proj.weight")
        assert torch.equal(fp8, tensor) != is_linear, name
        assert torch.equal(to_view(name, tensor, "fp32"), tensor)
        assert torch.equal(to_view(name, tensor, "bf16"), tensor.bfloat16())
