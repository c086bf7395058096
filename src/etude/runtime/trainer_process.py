"""The trainer's process: the policy, its HTTP service, and the publisher of its versions.

It starts at the policy that RL starts from, and publishes nothing: the controller brings it to where the run stands
(`runtime.recovery`).
"""

import asyncio
from collections.abc import Mapping

import torch

from etude.config import RunConfig
from etude.interfaces import Ledger
from etude.policy.files import load_policy
from etude.runtime.checkpoints import read_trainer_files, trainer_file_key
from etude.runtime.children import say_ready, until_parent_gone
from etude.runtime.directory import RunDirectory
from etude.store.ledger import LedgerWriter
from etude.store.ledger_format import open_run_id
from etude.store.limited import LimitedStore
from etude.telemetry.clock import SystemClock
from etude.telemetry.events import Published
from etude.training.service import TrainerService
from etude.training.trainer import Trainer, TrainerPlan
from etude.weights.background import BackgroundPublisher
from etude.weights.line import Line

_ANNOUNCED_WITHIN_S = 60.0


async def serve_trainer(url: str) -> None:
    """Serve the trainer of a run until the parent process is gone."""
    await until_parent_gone(_open_and_serve(url))


async def _open_and_serve(url: str) -> None:
    run = RunDirectory.open(url)
    config = await run.config()
    torch.set_num_threads(config.trainer.threads)
    trainer = await _start(run, config)
    async with await LedgerWriter.open(run.store, run.local, "trainer", await open_run_id(run.store)) as ledger:
        publisher = _publisher(run, config, ledger)
        service = TrainerService(
            trainer,
            publisher=publisher,
            save_checkpoint=lambda step, files: asyncio.run(_save(run, step, files)),
            load_checkpoint=lambda step: asyncio.run(read_trainer_files(run.store, step)),
            ledger=ledger,
        )
        await service.start()
        try:
            say_ready(f"http://127.0.0.1:{service.port}", ledger.writer)
            await asyncio.Event().wait()
        finally:
            await service.stop()
            publisher.close()


async def _start(run: RunDirectory, config: RunConfig) -> Trainer:
    """Return the trainer at the policy that RL starts from."""
    plan = TrainerPlan(
        algorithm=config.algorithm,
        trainer=config.trainer,
        sampling=config.sampling,
        group_size=config.rollout.group_size,
    )
    return Trainer(load_policy(await run.starting_policy(config)), plan)


def _publisher(run: RunDirectory, config: RunConfig, ledger: Ledger) -> BackgroundPublisher:
    """Return the publisher, which works in threads with event loops of their own; the ledger stays with this one."""
    loop = asyncio.get_running_loop()

    async def announce(published: Published) -> None:
        ledger.record(published)
        flushed = asyncio.run_coroutine_threadsafe(ledger.flush(), loop)
        await asyncio.to_thread(flushed.result, _ANNOUNCED_WITHIN_S)

    weights = config.weights
    line = Line(
        LimitedStore(run.store, clock=SystemClock(), upload_bytes_s=weights.upload_mb_s * 1e6),
        announce=announce,
        dtype=weights.dtype,
        anchor_share=weights.anchor_share,
        skips=weights.skips,
        difference=weights.difference,
        encoders=weights.encoders,
        uploads=weights.uploads,
    )
    return BackgroundPublisher(line=line)


async def _save(run: RunDirectory, step: int, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        await run.store.put(trainer_file_key(step, name), data)
