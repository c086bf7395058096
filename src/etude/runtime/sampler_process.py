"""A sampler's process: the engine, its HTTP service, and the follower that brings new weights."""

import asyncio
import sys

import torch

from etude.config import PoolSection, RunConfig
from etude.errors import ConfigError, RunError, StoreError
from etude.policy.files import load_shape
from etude.runtime.children import say_ready, until_parent_gone
from etude.runtime.directory import RunDirectory
from etude.sampling.decode_loop import Held
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.sampler import EngineSampler
from etude.sampling.service import serving
from etude.store.ledger import LedgerWriter
from etude.store.ledger_format import open_run_id
from etude.telemetry.clock import SystemClock
from etude.weights.chain import WEIGHTS
from etude.weights.derived import view_keys
from etude.weights.follower import Follower, StagedVersion
from etude.weights.memory import memory_of
from etude.weights.sources import open_source

_FIRST_WEIGHTS_S = 60.0
_PREFIX_BYTES = 256 << 20
"""Of keys and values kept for the next calls of sessions."""


async def serve_sampler(url: str, pool_name: str, index: int) -> None:
    """Serve one replica of a pool until the parent process is gone."""
    await until_parent_gone(_open_and_serve(url, pool_name, index))


async def _open_and_serve(url: str, pool_name: str, index: int) -> None:
    run = RunDirectory.open(url)
    config = await run.config()
    pool = next((pool for pool in config.pools if pool.name == pool_name), None)
    if pool is None:
        msg = f"{url} has no pool {pool_name!r}: its pools are {', '.join(pool.name for pool in config.pools)}"
        raise ConfigError(msg)
    torch.set_num_threads(pool.threads)
    keys = view_keys(pool.view) if pool.view_source == "derived" else WEIGHTS
    clock, name = SystemClock(), f"{pool.name}-{index}"
    # The samplers of this host share what they download; a run on its disk is not copied there once more.
    cache = None if run.is_local else run.local / "weights"
    async with open_source(run.store, clock=clock, keys=keys, reader=name, cache=cache) as source:
        follower = Follower(
            run.store,
            clock=clock,
            keys=keys,
            poll_s=config.weights.poll_s,
            objects=source.objects,
            lease=source.lease,
            memory=memory_of(pool.device),
        )
        await _serve(*await _sampler(run, config, pool, name, follower), follower)


async def _sampler(
    run: RunDirectory, config: RunConfig, pool: PoolSection, name: str, follower: Follower
) -> tuple[EngineSampler, LedgerWriter]:
    """Return a sampler that holds the newest version, and its ledger."""
    first = await _first_weights(follower)
    # The last bits of a row depend on the rows beside it, and on which part of its prompt an earlier call left behind.
    alone = config.run.deterministic
    engine = TorchEngine(
        load_shape(await run.starting_policy(config)),
        first.tensors,
        view=pool.view,
        max_batch=1 if alone else pool.max_batch,
        prefix_bytes=0 if alone else _PREFIX_BYTES,
        device=pool.device,
    )
    ledger = await LedgerWriter.open(run.store, run.local, name, await open_run_id(run.store))
    sampler = EngineSampler(
        engine,
        sampler_id=name,
        pool=pool.name,
        view=pool.view,
        held=Held(lineage=first.lineage, version=first.version, digest=first.digest),
        ledger=ledger,
    )
    return sampler, ledger


async def _serve(sampler: EngineSampler, ledger: LedgerWriter, follower: Follower) -> None:
    async with ledger, sampler, serving(sampler) as address:
        say_ready(address, ledger.writer)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(_follow(sampler, follower), name="follow the weights")
            parts.create_task(sampler.watch(), name="engine")


async def _first_weights(follower: Follower) -> StagedVersion:
    """Return the newest version, waiting for the trainer to publish it."""
    try:
        async with asyncio.timeout(_FIRST_WEIGHTS_S):
            async for staged in follower.staged():
                return staged
    except TimeoutError:
        pass
    msg = f"waited {_FIRST_WEIGHTS_S:.0f} s for {follower.waiting_for}: is whoever publishes it up?"
    raise RunError(msg)


async def _follow(sampler: EngineSampler, follower: Follower) -> None:
    """Swap in every new version; while the chain cannot be read the sampler keeps what it has and looks again."""
    while True:
        try:
            await sampler.follow(follower)
        except StoreError as error:
            sys.stderr.write(f"cannot follow the weights, keeping the version held: {error}\n")
            sys.stderr.flush()
