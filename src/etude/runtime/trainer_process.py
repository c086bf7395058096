"""The trainer's process: the policy, its HTTP service, and the publisher of its versions."""

import asyncio
from collections.abc import Mapping

import torch

from etude.config import RunConfig
from etude.errors import StoreError
from etude.policy.files import load_policy
from etude.runtime.checkpoints import latest_checkpoint, read_trainer_files, trainer_file_key
from etude.runtime.children import say_ready, until_parent_gone
from etude.runtime.directory import RunDirectory
from etude.training.checkpoint import restore
from etude.training.service import TrainerService
from etude.training.trainer import Trainer, TrainerPlan
from etude.weights.background import BackgroundPublisher
from etude.weights.publisher import Publisher, new_lineage, open_publisher
from etude.weights.reader import read_head


async def serve_trainer(url: str) -> None:
    """Serve the trainer of a run until the parent process is gone; its newest version is published first."""
    await until_parent_gone(_open_and_serve(url))


async def _open_and_serve(url: str) -> None:
    run = RunDirectory.open(url)
    config = await run.config()
    torch.set_num_threads(config.trainer.threads)
    trainer = await _open_trainer(run, config)
    publisher = await _open_publisher(run, config, trainer)
    background = BackgroundPublisher(publisher)

    def save(step: int, files: Mapping[str, bytes]) -> None:
        asyncio.run(_save(run, step, files))

    service = TrainerService(trainer, publisher=background, save_checkpoint=save)
    await service.publish()
    await service.start()
    try:
        say_ready(f"http://127.0.0.1:{service.port}")
        await asyncio.Event().wait()
    finally:
        await service.stop()
        background.close()


async def _open_trainer(run: RunDirectory, config: RunConfig) -> Trainer:
    """Return the trainer at the newest checkpoint, else at the policy that RL starts from."""
    decoder = load_policy(await run.starting_policy(config))
    plan = TrainerPlan(
        algorithm=config.algorithm,
        trainer=config.trainer,
        sampling=config.sampling,
        group_size=config.rollout.group_size,
    )
    trainer = Trainer(decoder, plan)
    checkpoint = await latest_checkpoint(run.store)
    if checkpoint is not None:
        restore(trainer, await read_trainer_files(run.store, checkpoint.step))
    return trainer


async def _open_publisher(run: RunDirectory, config: RunConfig, trainer: Trainer) -> Publisher:
    """Go on in the lineage of the head when it holds exactly these weights, else start a new one.

    A crash after the last checkpoint leaves newer versions behind: their numbers will be made again, from other
    rollouts, so they must not share a lineage with what is made now.
    """
    head = await read_head(run.store)
    weights = config.weights
    if head is not None and head.version == trainer.version:
        publisher = await open_publisher(
            run.store, lineage=head.lineage, dtype=weights.dtype, anchor_every=weights.anchor_every
        )
        try:
            await publisher.publish(version=trainer.version, step=trainer.step, tensors=trainer.tensors())
        except StoreError:
            pass
        else:
            return publisher
    return await open_publisher(
        run.store, lineage=new_lineage(head), dtype=weights.dtype, anchor_every=weights.anchor_every
    )


async def _save(run: RunDirectory, step: int, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        await run.store.put(trainer_file_key(step, name), data)
