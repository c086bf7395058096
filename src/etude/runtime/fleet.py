"""Everything that plays rollouts: samplers behind a router, the gateway, sandboxes, the grader."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from etude.config import PoolSection, RunConfig
from etude.environments.local import LocalBackend
from etude.errors import HostError, RunError, SamplerError
from etude.gateway.renderers.registry import load_renderer
from etude.gateway.service import Gateway
from etude.interfaces import Ledger
from etude.rewards.grader import HarborGrader
from etude.rewards.screens import digs_for_the_solution
from etude.rollout.harness import HARNESS_MOUNT, harness_directory
from etude.rollout.identity import HarnessIdentity, identify
from etude.rollout.player import HarnessPlayer
from etude.runtime.canaries import Canaries
from etude.runtime.children import etude_command
from etude.runtime.directory import RunDirectory
from etude.runtime.inspection import Expected
from etude.runtime.probe_text import probe_text
from etude.runtime.probes import Prober
from etude.runtime.recorder import Recorder
from etude.runtime.roster import Roster
from etude.runtime.supervisor import Program, Supervisor
from etude.sampling.router import SamplerRouter
from etude.sampling.seats import Terms
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.waits import waiting
from etude.training.client import TrainerClient
from etude.types import SamplerStatus, SamplingParams
from etude.weight_types import Head
from etude.weights.reader import read_head

START_S = 180.0
"""Longest time that a process may take until it serves, restarts included."""

RESTART_S = 150.0
"""How long requests wait for samplers that were ended: a pause, and a start."""

_SERVED_WITHIN_S = 120.0
_SANDBOXES_S = 60.0


class Fleet:
    """What a stage needs to play attempts."""

    def __init__(
        self,
        *,
        player: HarnessPlayer,
        router: SamplerRouter,
        roster: Roster,
        canaries: Canaries,
        recorder: Recorder,
        logs: Path,
    ) -> None:
        self.player = player
        self.router = router
        self.roster = roster
        self.canaries = canaries
        self.recorder = recorder
        self.logs = logs

    async def statuses(self) -> Sequence[SamplerStatus]:
        """Return the state of every sampler in service, which may be none."""
        try:
            return await self.router.status()
        except SamplerError:
            return ()

    async def served_version(self, lineage: str | None = None) -> int | None:
        """Return the oldest policy version that a sampler in service serves.

        None while one serves another lineage, or while none is in service. One that is down serves nothing: it joins
        again at the head, and no request that is bound to a newer version than it holds is served by it.
        """
        statuses = await self.statuses()
        if not statuses or (lineage is not None and any(status.lineage != lineage for status in statuses)):
            return None
        return min(status.version for status in statuses)

    async def wait_until_served(self, head: Head, *, poll_s: float = 0.05) -> None:
        """Return when every sampler in service serves the head's version; raise `RunError` when that takes too long."""

        def late(text: str) -> RunError:
            return RunError(f"{text}; see {self.logs}/sampler-*.log")

        wanted = f"version {head.version}"
        async with waiting(wanted, owner="etude run", on="the samplers", deadline_s=_SERVED_WITHIN_S, error=late):
            while await self.served_version(head.lineage) != head.version:  # noqa: ASYNC110 samplers tell nobody
                await asyncio.sleep(poll_s)


@asynccontextmanager
async def open_fleet(
    run: RunDirectory,
    config: RunConfig,
    supervisor: Supervisor,
    recorder: Recorder,
    *,
    publish: Callable[[], Awaitable[None]],
    trainer: Callable[[], TrainerClient],
    note: Callable[[str], None],
) -> AsyncGenerator[Fleet]:
    """Start samplers, gateway and sandboxes, and stop them at the end of the block; the supervisor ends the samplers.

    Samplers load while `publish` brings out the version that they wait for, and serve once they agree with the
    `trainer`. Raise what `sandboxes` and `publish` raise, and `RunError` when a process does not come up or the
    renderer does not fit the policy.
    """
    async with AsyncExitStack() as stack:
        async with waiting("sandboxes", owner="etude run", on="this host", deadline_s=_SANDBOXES_S):
            backend = await stack.enter_async_context(sandboxes(config, run=run.url, ledger=recorder.ledger))
        supervision = config.supervision
        router = SamplerRouter(patience_s=supervision.lease_s + RESTART_S, region=config.run.region)
        renderer = load_renderer(await run.starting_policy(config), config.policy.renderer)
        text = probe_text(renderer)
        prober = Prober(text, config, trainer=trainer, ledger=recorder.ledger)
        roster = Roster(
            router,
            supervisor,
            expected={name: Expected(sampler_id=name, pool=pool.name, view=pool.view) for name, pool in _names(config)},
            read_head=lambda: read_head(run.store),
            look_s=supervision.heartbeat_s,
            patience_s=supervision.lease_s,
            ledger=recorder.ledger,
            note=note,
            proof=prober.prove,
            terms={name: Terms(price=pool.price, region=pool.region) for name, pool in _names(config)},
        )
        await stack.enter_async_context(roster)
        for program in (*_derivers(run, config), *_samplers(run, config)):
            supervisor.start(program)
        await publish()
        async with asyncio.TaskGroup() as starting:
            for name, _ in _names(config):
                starting.create_task(_up(supervisor, name), name=f"start {name}")
        await roster.complete(owner="etude run", deadline_s=START_S)
        canaries = Canaries(
            text, config, trainer=trainer, samplers=roster, read_head=lambda: read_head(run.store), note=note
        )
        await stack.enter_async_context(canaries)
        gateway = Gateway(
            sampler=router,
            renderer=renderer,
            context_length=min(status.max_context for status in await router.status()),
            rules=config.harness.rules,
        )
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        identity = await asyncio.to_thread(identify, config.harness)
        player = _player(config, identity, gateway, router, backend, recorder)
        logs = run.local / "logs"
        yield Fleet(player=player, router=router, roster=roster, canaries=canaries, recorder=recorder, logs=logs)


@asynccontextmanager
async def sandboxes(config: RunConfig, *, run: str = "", ledger: Ledger = NO_LEDGER) -> AsyncGenerator[LocalBackend]:
    """Open the sandbox backend with the harness mounted; `run` names it to other processes of this host.

    Raises:
        HarnessError: The harness's directory is missing.
        HostError: This host cannot isolate sandboxes as far as `environment.require` asks.
    """
    mounts = {HARNESS_MOUNT: harness_directory(config.harness)}
    backend = await LocalBackend.start(mounts=mounts, run=run, ledger=ledger)
    try:
        _check_isolation(backend, config)
        yield backend
    finally:
        await backend.close()


def _player(
    config: RunConfig,
    identity: HarnessIdentity,
    gateway: Gateway,
    router: SamplerRouter,
    backend: LocalBackend,
    recorder: Recorder,
) -> HarnessPlayer:
    return HarnessPlayer(
        host=gateway,
        backend=backend,
        grader=HarborGrader(backend),
        harness=config.harness,
        identity=identity,
        params=SamplingParams(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            max_tokens=config.sampling.max_tokens,
        ),
        on_record=recorder.rollout,
        ledger=recorder.ledger,
        watch=digs_for_the_solution,
        unserved_s=router.unserved_s,
    )


def trainer_program(run: RunDirectory, config: RunConfig) -> Program:
    """Return the trainer's process."""
    return Program(
        name="trainer",
        kind="trainer",
        command=etude_command("serve-trainer", run.url),
        log=run.local / "logs" / "trainer.log",
        environment=_environment(config.trainer.threads),
    )


def _names(config: RunConfig) -> Iterator[tuple[str, PoolSection]]:
    """Yield the id of each sampler with its pool."""
    for pool in config.pools:
        for index in range(pool.replicas):
            yield f"{pool.name}-{index}", pool


def _samplers(run: RunDirectory, config: RunConfig) -> Iterator[Program]:
    for name, pool in _names(config):
        index = name.removeprefix(f"{pool.name}-")
        yield Program(
            name=name,
            kind="sampler",
            command=etude_command("serve-sampler", run.url, "--pool", pool.name, "--index", index),
            log=run.local / "logs" / f"sampler-{name}.log",
            environment=_environment(pool.threads),
        )


def _derivers(run: RunDirectory, config: RunConfig) -> Iterator[Program]:
    """Yield what publishes the views that pools do not make themselves."""
    for view in sorted({pool.view for pool in config.pools if pool.view_source == "derived"}):
        yield Program(
            name=f"derive-{view}",
            kind="deriver",
            command=etude_command("serve-deriver", run.url, "--view", view),
            log=run.local / "logs" / f"derive-{view}.log",
            environment=_environment(1),
        )


async def _up(supervisor: Supervisor, name: str) -> None:
    await supervisor.up(name, owner="etude run", deadline_s=START_S)


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
