"""A gateway without a run: for somebody who has harnesses, samplers and an orchestrator, and wants exact tokens."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from etude.errors import ConfigError, SamplerError
from etude.gateway.collector import collect_rarely
from etude.gateway.control import ControlApi
from etude.gateway.renderers.registry import load_renderer
from etude.gateway.service import Gateway
from etude.sampling.client import SamplerClient
from etude.sampling.router import SamplerRouter

ADMIN_KEY_VARIABLE = "ETUDE_ADMIN_KEY"
_LOOK_S = 2.0


async def serve_gateway(
    model: Path,
    samplers: Sequence[str],
    *,
    renderer: str,
    admin_key: str,
    port: int,
    control_port: int,
    say: Callable[[str], None],
) -> None:
    """Serve model API and control API until cancelled; `say` is told both addresses once they answer.

    Raises:
        ConfigError: There is no usable admin key.
        HostError: A port is taken.
        PolicyError: The model directory has no tokenizer, or no renderer fits it.
        SamplerError: No sampler answers.
    """
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(SamplerClient(url)) for url in samplers]
        router = SamplerRouter(clients)
        watching = asyncio.create_task(_watch(router), name="watch the samplers")
        stack.callback(watching.cancel)
        rendering = await asyncio.to_thread(load_renderer, model, renderer)
        context_length = min(status.max_context for status in await router.status())
        gateway = Gateway(sampler=router, renderer=rendering, context_length=context_length)
        try:
            control = ControlApi(gateway, admin_key=admin_key)
        except ValueError as error:
            msg = f"environment variable {ADMIN_KEY_VARIABLE}: {error}"
            raise ConfigError(msg) from error
        await gateway.start(port)
        stack.push_async_callback(gateway.stop)
        await control.start(control_port)
        stack.push_async_callback(control.stop)
        collect_rarely()
        say(f"model API    http://127.0.0.1:{gateway.port}/v1")
        say(f"control API  http://127.0.0.1:{control.port}")
        await watching


async def _watch(router: SamplerRouter) -> None:
    """Ask the samplers how they are, for the router to know their versions and who wants to leave."""
    while True:
        await asyncio.sleep(_LOOK_S)
        with suppress(SamplerError):
            await router.status()
