"""Everything that plays rollouts: samplers behind a router, the gateway, sandboxes, the grader."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from etude.config import RunConfig
from etude.environments.local import LocalBackend
from etude.errors import HostError, RunError
from etude.gateway.renderers.registry import load_renderer
from etude.gateway.service import Gateway
from etude.interfaces import Sampler
from etude.rewards.grader import HarborGrader
from etude.rollout.harness import HARNESS_MOUNT, harness_directory
from etude.rollout.player import HarnessPlayer
from etude.runtime.children import Child, child, etude_command
from etude.runtime.directory import RunDirectory
from etude.runtime.recorder import Recorder
from etude.sampling.client import SamplerClient
from etude.sampling.router import SamplerRouter
from etude.types import Head, SamplingParams

_START_S = 120.0
_SERVED_WITHIN_S = 120.0


class Fleet:
    """What a stage needs to play attempts."""

    def __init__(
        self, *, player: HarnessPlayer, router: SamplerRouter, recorder: Recorder, children: list[Child], logs: Path
    ) -> None:
        self.player = player
        self.router = router
        self.recorder = recorder
        self.children = children
        self.logs = logs

    async def served_version(self, lineage: str | None = None) -> int | None:
        """Return the oldest policy version that any sampler serves; None while one serves another lineage."""
        statuses = await self.router.status()
        if lineage is not None and any(status.lineage != lineage for status in statuses):
            return None
        return min(status.version for status in statuses)

    async def wait_until_served(self, head: Head, *, poll_s: float = 0.05) -> None:
        """Return when every sampler serves the head's version; raise `RunError` when that takes over two minutes."""
        try:
            async with asyncio.timeout(_SERVED_WITHIN_S):
                while True:
                    if await self.served_version(head.lineage) == head.version:
                        return
                    await asyncio.sleep(poll_s)
        except TimeoutError as error:
            msg = f"the samplers do not serve version {head.version} after {_SERVED_WITHIN_S:.0f} s"
            raise RunError(f"{msg}; see {self.logs}/sampler-*.log") from error


@asynccontextmanager
async def open_fleet(run: RunDirectory, config: RunConfig, trainer: Child, recorder: Recorder) -> AsyncGenerator[Fleet]:
    """Start samplers, gateway and sandboxes, and stop them at the end of the block.

    The trainer comes up at the same time: samplers wait for the version that it publishes. Raise what `sandboxes`
    raises, and `RunError` when a process does not come up.
    """
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(sandboxes(config))
        samplers = [await stack.enter_async_context(process) for process in _samplers(run, config)]
        children = [trainer, *samplers]
        await asyncio.gather(*(process.wait_until_ready(_START_S) for process in children))
        router = SamplerRouter()
        for process in samplers:
            router.add(await stack.enter_async_context(SamplerClient(process.url)))
        gateway = Gateway(
            sampler=router,
            renderer=load_renderer(await run.starting_policy(config), config.policy.renderer),
            context_length=await _context_length(router),
        )
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        player = HarnessPlayer(
            host=gateway,
            backend=backend,
            grader=HarborGrader(backend),
            harness=config.harness,
            params=SamplingParams(
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                top_k=config.sampling.top_k,
                max_tokens=config.sampling.max_tokens,
            ),
            on_record=recorder.rollout,
            ledger=recorder.ledger,
        )
        yield Fleet(player=player, router=router, recorder=recorder, children=children, logs=run.local / "logs")


@asynccontextmanager
async def sandboxes(config: RunConfig) -> AsyncGenerator[LocalBackend]:
    """Open the sandbox backend with the harness mounted.

    Raises:
        HarnessError: The harness's directory is missing.
        HostError: This host cannot isolate sandboxes as far as `environment.require` asks.
    """
    backend = await LocalBackend.start(mounts={HARNESS_MOUNT: harness_directory(config.harness)})
    try:
        _check_isolation(backend, config)
        yield backend
    finally:
        await backend.close()


def trainer_child(run: RunDirectory, config: RunConfig) -> AbstractAsyncContextManager[Child]:
    """Start the trainer's process; once it is ready, its version is published."""
    return child(
        "trainer",
        etude_command("serve-trainer", run.url),
        log=run.local / "logs" / "trainer.log",
        environment=_environment(config.trainer.threads),
    )


def _samplers(run: RunDirectory, config: RunConfig) -> Iterator[AbstractAsyncContextManager[Child]]:
    for pool in config.pools:
        for index in range(pool.replicas):
            name = f"{pool.name}-{index}"
            yield child(
                f"sampler {name}",
                etude_command("serve-sampler", run.url, "--pool", pool.name, "--index", str(index)),
                log=run.local / "logs" / f"sampler-{name}.log",
                environment=_environment(pool.threads),
            )


def _environment(threads: int) -> dict[str, str]:
    """Return this process's environment, with the number of threads that numerical libraries may start."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _check_isolation(backend: LocalBackend, config: RunConfig) -> None:
    missing = [name for name in config.environment.require if not getattr(backend.capabilities, name, False)]
    if missing:
        reasons = " ".join(backend.limitations)
        msg = (
            f"sandboxes on this host are not {', '.join(missing)}, which environment.require asks for. {reasons} "
            "To accept that, shorten the list: --set environment.require=[]"
        )
        raise HostError(msg)


async def _context_length(sampler: Sampler) -> int:
    return min(status.max_context for status in await sampler.status())
