# pyright: basic
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from etude.cli.weights_forecast import forecast as command
from etude.weights.codec import DIFFERENCES, encode
from etude.weights.forecast import density, forecast
from etude.weights.tensors import FlatTensor, flatten

RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5)
PERCENT = {
    0.01: (0.26, 0.70, 1.95, 4.9, 12.8, 28.5),
    0.02: (0.14, 0.38, 1.08, 2.76, 7.5, 17.3),
    0.04: (0.08, 0.21, 0.59, 1.53, 4.2, 10.2),
    0.10: (0.03, 0.09, 0.26, 0.69, 2.0, 4.9),
}
"""Share of changed weights by their standard deviation and the learning rate, for a mean update of 0.2."""


def normal(deviation: float, size: int = 1 << 19, dtype: torch.dtype = torch.bfloat16) -> FlatTensor:
    return flatten((torch.randn(size, generator=torch.Generator().manual_seed(5)) * deviation).to(dtype))


def steps(lr: float, number: int, *, dtype: torch.dtype, size: int = 1 << 20) -> tuple[list[FlatTensor], float]:
    """Return published weights after each of the last two steps of AdamW on noisy gradients, and the mean update."""
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(size // 1024, 1024, generator=draw) * 0.02
    weights *= torch.exp(0.3 * torch.randn(size // 1024, 1, generator=draw))
    # Whatever was not published lies anywhere in the rounding cell, as after many steps.
    cell = torch.exp2(torch.floor(torch.log2(weights.abs().clamp(min=1e-30))) - 7)
    weights += cell * (torch.rand(weights.shape, generator=draw) - 0.5)
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    direction = 0.1 * torch.randn(weights.shape, generator=draw)
    published = []
    for step in range(1, number + 1):
        gradient = torch.randn(weights.shape, generator=draw) + direction
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        weights -= lr * update
        published.append(flatten(weights.to(dtype).clone()))
    return published[-2:], float(update.abs().mean())


@pytest.mark.parametrize("deviation", PERCENT)
def test_density_follows_from_learning_rate_and_weights(deviation):
    weights = normal(deviation)
    found = [100 * density(weights, 0.2 * lr) for lr in RATES]
    # The table has two digits, so its smallest entries are within a half of the last one.
    np.testing.assert_allclose(found, PERCENT[deviation], rtol=0.1, atol=0.005)


@pytest.mark.parametrize(
    ("lr", "dtype"), [(1e-6, torch.bfloat16), (1e-5, torch.bfloat16), (1e-3, torch.float32), (1e-5, torch.float32)]
)
def test_bytes_of_a_step_are_foretold_within_a_tenth(lr, dtype):
    (old, new), update = steps(lr, 12, dtype=dtype)
    foretold = forecast({"w": old}, lr=lr, update=update)
    changed = float((old.data.view("u2") != new.data.view("u2")).mean()) if dtype == torch.bfloat16 else 1.0
    assert foretold.density == pytest.approx(changed, rel=0.07)
    for difference in DIFFERENCES:
        _, packed = encode(new.data, old.data, dtype=old.dtype, difference=difference)
        assert foretold.num_bytes[difference] == pytest.approx(len(packed), rel=0.1)


def test_an_anchor_is_due_when_differences_have_half_its_bytes():
    weights = {"a": normal(0.02), "b": normal(0.1)}
    foretold = forecast(weights, lr=1e-6)
    alone = sum(len(encode(flat.data, None, dtype=flat.dtype)[1]) for flat in weights.values())
    assert foretold.anchor == pytest.approx(alone, rel=0.01)
    for difference, number in foretold.anchor_steps.items():
        step = foretold.num_bytes[difference]
        assert (number - 1) * step < 0.5 * foretold.anchor <= number * step


def test_a_reader_that_is_far_behind_needs_less_at_once_than_in_turn_and_never_more_than_an_anchor():
    foretold = forecast({"w": normal(0.02)}, lr=1e-5)
    for behind in foretold.behind.values():
        at_once = [row.at_once for row in behind]
        assert at_once == sorted(at_once)
        assert all(row.at_once < row.in_turn and row.at_once <= foretold.anchor for row in behind)


def test_tensors_without_weights_cost_nothing():
    foretold = forecast({"steps": flatten(torch.arange(9)), "none": flatten(torch.zeros(0))}, lr=1e-3)
    assert (foretold.density, set(foretold.num_bytes.values())) == (0.0, {0})
    assert forecast({}, lr=1.0).raw == 0


def test_a_model_directory_is_forecast_on_the_command_line(tmp_path):
    layers = {f"model.layers.{index}.mlp.up_proj.weight": torch.randn(512, 512) * 0.02 for index in range(2)}
    save_file(layers, tmp_path / "model.safetensors")
    ended = CliRunner().invoke(command, [str(tmp_path), "--lr", "1e-6"])
    assert ended.exit_code == 0, ended.output
    assert "model.layers.*.mlp.up_proj.weight" in ended.output
    ended = CliRunner().invoke(command, [str(tmp_path), "--lr", "1e-6", "--json"])
    found = json.loads(ended.output)
    assert found["density"] == pytest.approx(0.0108, rel=0.1)
    assert len(found["tensors"]) == 2
