"""The stages before rollouts: `pretrain` makes a policy from nothing, `sft` teaches it the harness's format."""

import json
import shutil

import torch

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.gateway.renderers.chatml import TURN_END
from etude.gateway.renderers.registry import load_renderer
from etude.interfaces import MetricSink
from etude.learning_config import OptimizerSection
from etude.policy.decoder import Decoder
from etude.policy.files import load_policy, save_policy
from etude.policy.initial import initial_policy, shape_from
from etude.runtime.corpus import RENDERER, corpus_problems, family_tokenizer, pretrain_rows, sft_rows
from etude.runtime.directory import RunDirectory
from etude.runtime.families import family_of
from etude.telemetry.console import Console
from etude.training.supervised import Document, SupervisedStep, train_supervised

_EVERY_STEPS = 20
"""Optimizer steps per row of metrics."""


async def pretrain(run: RunDirectory, config: RunConfig, sink: MetricSink, console: Console) -> None:
    """Train a policy from nothing and leave it at policy/pretrain.

    Raises:
        ConfigError: There is nothing to pretrain on, or a model directory is configured already.
    """
    if config.policy.path:
        msg = (
            f"policy.path = {config.policy.path!r} is a trained model: leave pretrain out of stages, or unset the path"
        )
        raise ConfigError(msg)
    problems = corpus_problems(config)
    tokenizer = family_tokenizer(problems, config.policy.shape.vocab, family_of(config).corpus)
    end = tokenizer.token_to_id(TURN_END)
    assert end is not None
    shape = shape_from(config.policy.shape, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(end,))
    decoder = initial_policy(shape, config.run.seed)
    rows = pretrain_rows(config, problems, tokenizer)
    torch.set_num_threads(config.pretrain.threads)
    _learn(decoder, rows, config.pretrain, "pretrain", sink, console)
    files = {"tokenizer.json": tokenizer.to_str().encode(), "etude.json": json.dumps({"renderer": RENDERER}).encode()}
    await _leave(run, "pretrain", decoder, files)


async def sft(run: RunDirectory, config: RunConfig, sink: MetricSink, console: Console) -> None:
    """Train on demonstrations from where `pretrain` or `policy.path` left off, and leave the policy at policy/sft."""
    origin = await run.starting_policy(config, ("pretrain",))
    renderer = load_renderer(origin, config.policy.renderer)
    decoder = load_policy(origin)
    torch.set_num_threads(config.sft.threads)
    _learn(decoder, sft_rows(config, renderer), config.sft, "sft", sink, console)
    kept = [path for path in origin.iterdir() if path.suffix in (".json", ".jinja", ".txt") and path.is_file()]
    weights = {"config.json", "model.safetensors.index.json"}
    await _leave(run, "sft", decoder, {path.name: path.read_bytes() for path in kept if path.name not in weights})


def _learn(
    decoder: Decoder,
    rows: list[list[Document]],
    optimizer: OptimizerSection,
    stage: str,
    sink: MetricSink,
    console: Console,
) -> None:
    with console.progress(stage, len(rows)) as advance:

        def on_step(step: SupervisedStep) -> None:
            advance(1)
            if step.step % _EVERY_STEPS == 0 or step.step == step.num_steps:
                sink.record({"stage": stage, "step": step.step, "version": 0, f"{stage}/loss": step.loss})

        train_supervised(decoder, rows, optimizer, on_step=on_step)


async def _leave(run: RunDirectory, stage: str, decoder: Decoder, files: dict[str, bytes]) -> None:
    """Write a stage's model directory, complete or not at all as far as this machine can see."""
    directory = run.local / "policy" / stage
    partial = directory.with_name(f"{stage}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_policy(decoder, partial, files)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    await run.upload(directory, f"policy/{stage}")
