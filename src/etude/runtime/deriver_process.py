"""A deriver's process: the chain of one view beside that of the policy, for the samplers that follow it."""

import asyncio
import sys

import torch
from aiohttp import web

from etude.errors import FencedError, StoreError
from etude.policy.views import View
from etude.runtime.children import say_ready, until_parent_gone
from etude.runtime.directory import RunDirectory
from etude.telemetry.clock import SystemClock
from etude.weights.derived import Deriver


async def serve_deriver(url: str, view: View) -> None:
    """Derive a view of every version of a run until the parent process is gone."""
    await until_parent_gone(_open_and_derive(url, view))


async def _open_and_derive(url: str, view: View) -> None:
    run = RunDirectory.open(url)
    weights = (await run.config()).weights
    torch.set_num_threads(1)
    deriver = Deriver(
        run.store,
        view=view,
        clock=SystemClock(),
        poll_s=weights.poll_s,
        anchor_share=weights.anchor_share,
        difference=weights.difference,
    )
    application = web.Application()
    application.add_routes([web.get("/health", _health)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        say_ready(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await _derive(deriver)
    finally:
        await runner.cleanup()
        await deriver.close()


async def _health(_request: web.Request) -> web.Response:
    return web.Response(status=204)


async def _derive(deriver: Deriver) -> None:
    """Follow the policy; while a chain cannot be read or written, say so and look again."""
    while True:
        try:
            async for _ in deriver.derived():
                pass
        except FencedError:
            raise
        except StoreError as error:
            sys.stderr.write(f"cannot derive, looking again: {error}\n")
            sys.stderr.flush()
            await asyncio.sleep(1.0)
