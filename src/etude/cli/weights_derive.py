"""`etude weights derive`."""

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import click

from etude.cli.weights_options import open_chain

if TYPE_CHECKING:
    from etude.policy.views import View

_VIEWS = ("bf16", "fp8", "fp8_block", "int8", "int4")


@click.command(epilog="Example: etude weights derive s3://bucket/run --view fp8")
@click.argument("url", metavar="URL")
@click.option("--view", type=click.Choice(_VIEWS), required=True, help="Precision of the samplers that follow it.")
@click.option("--once", is_flag=True, help="Derive the newest version and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per version.")
def derive(*, url: str, view: "View", once: bool, as_json: bool) -> None:
    """Publish what an engine of one precision holds of each version of a run, for `etude weights follow --view`.

    Runs beside the trainer or anywhere else, until it is ended; of two for one view the first one ends. A run derives
    what its own pools follow. Needs memory for the weights and their view.
    """
    with suppress(KeyboardInterrupt):
        asyncio.run(_derive(url, view, once=once, as_json=as_json))


async def _derive(url: str, view: "View", *, once: bool, as_json: bool) -> None:
    import msgspec

    from etude.runtime.directory import RunDirectory
    from etude.telemetry.clock import SystemClock
    from etude.weights.derived import Deriver

    store, _ = open_chain(url, "")
    weights = (await RunDirectory.open(url).config()).weights
    deriver = Deriver(
        store,
        view=view,
        clock=SystemClock(),
        poll_s=weights.poll_s,
        anchor_share=weights.anchor_share,
        difference=weights.difference,
    )
    try:
        async with aclosing(deriver.derived()) as manifests:
            async for manifest in manifests:
                size = sum({(piece.object, piece.offset): piece.length for piece in manifest.pieces}.values())
                row = {
                    "lineage": manifest.lineage,
                    "version": manifest.version,
                    "digest": manifest.digest,
                    "bytes": size,
                }
                line = msgspec.json.encode(row) if as_json else f"{view} of version {manifest.version}: {size} bytes"
                click.echo(line)
                if once:
                    return
    finally:
        await deriver.close()
