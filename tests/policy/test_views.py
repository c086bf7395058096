# pyright: basic
import hashlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from etude.errors import PolicyError
from etude.policy.digest import held_digest, view_digest
from etude.policy.files import random_policy
from etude.policy.quantise import FP8_BLOCKS, FP8_ROWS, INT4_GROUPS, INT8_ROWS, dequantise, quantise, recode
from etude.policy.shape import PolicyShape
from etude.policy.views import FORMATS, ViewRecord, in_view, out_of_view

SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=50, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_hidden=0,
    experts=4, experts_per_token=2, expert_hidden=8, qk_norm=True,
)  # fmt: skip
VIEWS = ("fp32", "bf16", *FORMATS)
ROWS = st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4), min_size=1, max_size=6)
BITS = st.integers(1, 40).flatmap(
    lambda rows: st.integers(1, 40).flatmap(
        lambda halves: st.binary(min_size=8 * rows * halves, max_size=8 * rows * halves).map(
            lambda data: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(rows, 2 * halves)
        )
    )
)


def published(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in random_policy(SHAPE, seed=seed).hf_tensors().items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def rounded(weights, code_format):
    return dequantise(*quantise(weights, code_format), code_format)


def scales(weights):
    return (weights.abs().amax(dim=1, keepdim=True) / 448).clamp(min=2.0**-126)


@given(ROWS)
@example([[0.0, 0.0, 0.0, 2.0**-149]])
@example([[0.0, -0.0, 2.0**-130, 2.0**-128]])
def test_fp8_keeps_each_value_within_a_sixteenth_or_a_tiny_step_of_its_row(rows):
    weights = torch.tensor(rows)
    step = scales(weights) * 2.0**-10  # half the smallest e4m3 number
    error = (rounded(weights, FP8_ROWS) - weights).abs()
    assert bool((error <= weights.abs() / 16 * (1 + 1e-5) + step * (1 + 1e-5)).all())


@given(ROWS)
def test_int8_keeps_each_value_within_half_a_step_of_its_row(rows):
    weights = torch.tensor(rows)
    step = (weights.abs().amax(dim=1, keepdim=True) / 127).clamp(min=2.0**-126)
    assert bool(((rounded(weights, INT8_ROWS) - weights).abs() <= step / 2 * (1 + 1e-4)).all())


@given(ROWS)
def test_int4_keeps_each_value_within_half_a_step_of_its_group(rows):
    weights = torch.tensor(rows).repeat(1, 20)
    steps = quantise(weights, INT4_GROUPS)[1].float().repeat_interleave(32, dim=1)[:, :80]
    # A scale that bfloat16 rounded down leaves the largest value beyond the last code.
    largest = 7 * 2.0**-8
    assert bool(((rounded(weights, INT4_GROUPS) - weights).abs() <= steps * (0.5 + largest)).all())


@given(BITS, st.sampled_from(list(FORMATS.values())), st.randoms())
def test_codes_do_not_depend_on_what_lies_beside_a_block(weights, code_format, random):
    """Any bit pattern: rows are given to quantisers in pieces, as hosts, ranks and threads would divide them."""
    codes, found = quantise(weights, code_format)
    cut = random.randrange(0, len(weights) + 1, min(code_format.rows, len(weights) + 1))
    pieces = [quantise(part, code_format) for part in (weights[:cut], weights[cut:]) if len(part)]
    assert bits(torch.cat([piece[0] for piece in pieces])) == bits(codes)
    assert bits(torch.cat([piece[1] for piece in pieces])) == bits(found)


@given(BITS, st.sampled_from(list(FORMATS.values())))
def test_codes_come_back_from_the_weights_they_stand_for(weights, code_format):
    codes, found = quantise(weights, code_format)
    assert bits(recode(dequantise(codes, found, code_format), found, code_format)) == bits(codes)


def test_large_matrices_are_coded_as_their_parts_are_in_any_number_of_threads():
    weights = torch.randn(700, 9000, generator=torch.Generator().manual_seed(1)) * 0.02
    for code_format in FORMATS.values():
        torch.set_num_threads(1)
        codes, found = quantise(weights, code_format)
        torch.set_num_threads(3)
        try:
            again = quantise(weights, code_format)
        finally:
            torch.set_num_threads(1)
        first = quantise(weights[: 3 * 128], code_format)
        assert [bits(part) for part in again] == [bits(codes), bits(found)]
        assert bits(first[0]) == bits(codes[: 3 * 128])
        assert bits(first[1]) == bits(found[: 3 * 128 // code_format.rows])


GOLDEN = {
    "fp8": "e4462d58add2f52055c71f7feb0514126944a92c4f97eddebe69de7a3be108b3",
    "fp8_block": "046afdd149780cca73d628248ac8e1d346fc8547a28dbd83029dde3bb13daf20",
    "int8": "de101e61ca092c46aa2da0d78687730b78d09f4db796cce47fca3ad2724fb73d",
    "int4": "db3fa85214572690b8436407d586bb4d696a9b8baade8ac4487ae3a22a8f708e",
}
"""sha256 of codes and scales: what every host must find. A change here breaks every chain that was derived before."""


@pytest.mark.parametrize("view", FORMATS)
def test_every_host_finds_the_same_codes(view):
    magnitudes = torch.arange(256 * 384, dtype=torch.int64) * 2654435761 % 65536
    weights = magnitudes.to(torch.uint16).view(torch.bfloat16).reshape(256, 384)  # all patterns, NaN among them
    weights = torch.where(weights.isfinite(), weights, 0.0).clamp(-3e4, 3e4)
    weights[5, 7] = torch.inf
    codes, found = quantise(weights, FORMATS[view])
    assert hashlib.sha256(bits(codes) + bits(found)).hexdigest() == GOLDEN[view]


def test_a_block_that_is_not_finite_is_one_nan_and_leaves_the_others_alone():
    for code_format, blocks in ((FP8_ROWS, 1), (INT8_ROWS, 1), (INT4_GROUPS, 1), (FP8_BLOCKS, 128)):
        weights = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))
        clean = quantise(weights, code_format)
        for value in (torch.inf, -torch.inf, torch.nan):
            weights[3, 5] = value
            codes, found = quantise(weights, code_format)
            assert int(found.isnan().sum()) == 1
            assert bits(codes[blocks + 3 :]) == bits(clean[0][blocks + 3 :])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_codes_the_linear_layers_and_keeps_the_rest_as_published(view, dtype):
    tensors = published(dtype)
    held = in_view(tensors, view)
    for name, tensor in tensors.items():
        coded = view in FORMATS and name.endswith("_proj.weight")
        assert (f"{name}_scale" in held) == coded
        if view in FORMATS and not coded:
            assert bits(held[name]) == bits(tensor)
    weights = out_of_view(held, view)
    assert weights.keys() == tensors.keys()
    assert all(weights[name].shape == tensor.shape for name, tensor in tensors.items())
    assert held_digest(in_view(held, view)) == held_digest(held) == view_digest(tensors, view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_is_told_from_the_weights_in_use_and_any_flipped_bit_shows(view, dtype):
    tensors = published(dtype)
    held = in_view(tensors, view)
    wanted, weights, record = held_digest(held), out_of_view(held, view), ViewRecord.of(held, view)
    assert held_digest(record.held(weights)) == wanted
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"):
        flat = weights[name].view(torch.int16 if view == "bf16" else torch.int32).reshape(-1)
        for bit in (0, 12):
            flat[3] ^= 1 << bit
            assert held_digest(record.held(weights)) != wanted
            flat[3] ^= 1 << bit
    assert held_digest(record.held(weights)) == wanted


@pytest.mark.parametrize("view", FORMATS)
def test_codes_that_do_not_fit_their_scales_are_refused(view):
    name = "model.layers.0.self_attn.o_proj.weight"
    held = in_view(published(), view)
    codes, scales = held[name], held[f"{name}_scale"]
    for wrong in (
        {f"{name}_scale": scales[:, :0]},
        {f"{name}_scale": scales.reshape(-1)},
        {f"{name}_scale": scales.double()},
        {f"{name}_scale": torch.cat((scales, scales))},
        {name: codes.float()},
        {name: torch.cat((codes.view(torch.uint8),) * 129).view(codes.dtype)},
    ):
        with pytest.raises(PolicyError, match="o_proj"):
            out_of_view(held | wrong, view)
    del held[f"{name}_scale"]
    with pytest.raises(PolicyError, match="o_proj"):
        out_of_view(held, view)
