"""`etude weights forecast`."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from etude.cli.weights_options import size_text

if TYPE_CHECKING:
    from etude.weights.forecast import Forecast, TensorForecast
    from etude.weights.forecast_inputs import PublishedStep
    from etude.weights.publisher import PublishedDtype
    from etude.weights.tensors import FlatTensor

_COMPARED = 8
"""Newest steps of a run whose bytes are compared with the forecast."""


@click.command(epilog="Example: etude weights forecast models/qwen3-0.6b --lr 1e-6")
@click.argument("target", metavar="MODEL_OR_URL")
@click.option("--lr", type=click.FloatRange(min=0.0, min_open=True), help="Learning rate; a run's own if not given.")
@click.option(
    "--update",
    type=click.FloatRange(min=0.0, min_open=True),
    default=0.2,
    show_default=True,
    help="Mean of the optimizer's update in units of the learning rate: 1 in Adam's first step, 0.35 where "
    "gradients repeat.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Precision in which a model will be published; a run has its own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def forecast(*, target: str, lr: float | None, update: float, dtype: "PublishedDtype", as_json: bool) -> None:
    """Foretell the bytes that each step will publish, and when an anchor is due.

    MODEL_OR_URL is a directory with safetensors, or a run, whose newest steps are then compared with the forecast.
    """
    import msgspec

    from etude.weights.forecast import forecast as foretell
    from etude.weights.forecast_inputs import model_tensors

    steps: list[PublishedStep] = []
    difference = ""
    if _is_model(target):
        if lr is None:
            raise click.UsageError("a model has no learning rate: give --lr")
        tensors = model_tensors(Path(target), dtype)
    else:
        tensors, steps, own_lr, difference = asyncio.run(_run_tensors(target))
        lr = lr or own_lr
    found = foretell(tensors, lr=lr, update=update)
    if as_json:
        extra = {"published": steps, "difference": difference, "ratio": _ratio(found, steps, difference)}
        click.echo(msgspec.json.encode(msgspec.to_builtins(found) | (extra if steps else {})))
        return
    for line in (*_tensor_lines(found.tensors), "", *_total_lines(found), *_measured_lines(found, steps, difference)):
        click.echo(line)


def _is_model(target: str) -> bool:
    return "://" not in target and any(Path(target).glob("*.safetensors"))


async def _run_tensors(url: str) -> "tuple[dict[str, FlatTensor], list[PublishedStep], float, str]":
    """Return the newest weights, what their steps published, the learning rate of these, and how they are coded."""
    from etude.cli.weights_options import open_chain
    from etude.runtime.directory import RunDirectory
    from etude.training.optimizer import learning_rate
    from etude.weights.forecast_inputs import newest_steps
    from etude.weights.history import require_head
    from etude.weights.reader import load_head

    store, _ = open_chain(url, "")
    config = await RunDirectory.open(url).config()
    head = await require_head(store)
    loaded = await load_head(store, head)
    steps = await newest_steps(store, head, last=_COMPARED)
    rates = [learning_rate(config.trainer, step.step) for step in steps] or [config.trainer.lr]
    return loaded.tensors, steps, sum(rates) / len(rates), config.weights.difference


def _tensor_lines(tensors: "Sequence[TensorForecast]") -> list[str]:
    """Return a line for all tensors that differ in the numbers of their names only."""
    alike: dict[str, list[TensorForecast]] = {}
    for tensor in tensors:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name), []).append(tensor)
    width = max((len(name) for name in alike), default=0)
    lines = [f"{'tensors':{width}}  {'weights':>12}  {'changed':>8}  {'rice_ulp':>9}  {'exp_ctx':>9}  {'anchor':>9}"]
    for name, group in alike.items():
        elements = sum(tensor.elements for tensor in group)
        changed = sum(tensor.density * tensor.elements for tensor in group) / max(1, elements)
        rice, context = (sum(tensor.num_bytes[key] for tensor in group) for key in ("rice_ulp", "exp_ctx"))
        anchor = sum(tensor.anchor for tensor in group)
        sizes = "  ".join(f"{size_text(size):>9}" for size in (rice, context, anchor))
        lines.append(f"{name:{width}}  {elements:12,}  {changed:8.3%}  {sizes}")
    return lines


def _total_lines(found: "Forecast") -> list[str]:
    lines = [
        f"{found.elements:,} weights ({size_text(found.raw)}), of which a step at lr {found.lr:g} changes "
        f"{found.density:.3%} (mean update {found.update:g} lr); an anchor has {size_text(found.anchor)}"
    ]
    for difference, size in found.num_bytes.items():
        share, every = size / max(1, found.raw), found.anchor_steps[difference]
        lines.append(f"{difference}: {size_text(size)} per step ({share:.3%}), an anchor every {every} steps")
        for row in found.behind[difference]:
            in_turn, at_once = size_text(row.in_turn), size_text(row.at_once)
            lines.append(f"  a reader {row.steps} steps behind fetches {in_turn} in turn, {at_once} at once")
    return lines


def _measured_lines(found: "Forecast", steps: "Sequence[PublishedStep]", difference: str) -> list[str]:
    if not steps:
        return []
    mean = sum(step.num_bytes for step in steps) / len(steps)
    return [
        f"published: {size_text(round(mean))} per step ({difference}, versions {steps[0].version} to "
        f"{steps[-1].version}), {_ratio(found, steps, difference):.2f} times the forecast"
    ]


def _ratio(found: "Forecast", steps: "Sequence[PublishedStep]", difference: str) -> float:
    """Return measured over foretold bytes; 0 when nothing was measured."""
    foretold = next((size for name, size in found.num_bytes.items() if name == difference), 0)
    return sum(step.num_bytes for step in steps) / len(steps) / foretold if steps and foretold else 0.0
