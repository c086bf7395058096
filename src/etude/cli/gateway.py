"""`etude gateway`: the gateway without a run."""

from pathlib import Path

import click


@click.group(epilog="Example: etude gateway check models/Qwen3-8B")
def gateway() -> None:
    """Check how conversations become tokens, or serve a model to harnesses of your own."""


@gateway.command(epilog="Example: etude gateway check models/Qwen3-8B --renderer template --json")
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--renderer", default="auto", show_default=True, help="A name that policy.renderer may have.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(model: Path, *, renderer: str, as_json: bool) -> int:
    """Try whether conversations with the model in directory MODEL go on token by token, tools included.

    Made-up conversations are rendered turn by turn and at once, with the model's own chat template and with the
    renderer that a run would use. Printed is after which messages a conversation goes on, after which it starts a
    branch, and the first break with its token. Exit code 3 when the renderer starts a branch after anything, or knows
    no tools.
    """
    import msgspec

    from etude.gateway.renderers.report import examine, lines_of
    from etude.telemetry.lines import printable

    report = examine(model, renderer)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        for line in lines_of(report):
            click.echo(printable(line))
    return 0 if report.holds else 3


@gateway.command(
    epilog="Example: ETUDE_ADMIN_KEY=$(openssl rand -hex 32) etude gateway serve --model models/Qwen3-8B "
    "--sampler http://127.0.0.1:8300"
)
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Directory with tokenizer and template.")
@click.option("--sampler", "samplers", required=True, multiple=True, metavar="URL", help="Where tokens are drawn.")
@click.option("--renderer", default="auto", show_default=True, help="A name that policy.renderer may have.")
@click.option("--port", default=0, show_default=True, help="Of the model API, on 127.0.0.1; 0 takes a free one.")
@click.option("--control-port", default=0, show_default=True, help="Of the control API, likewise.")
def serve(model: Path, samplers: tuple[str, ...], *, renderer: str, port: int, control_port: int) -> int:
    """Serve a model to harnesses and keep the exact tokens, for an orchestrator of your own.

    It opens sessions, gives rewards and reads rollouts through the control API, with the key in the environment
    variable ETUDE_ADMIN_KEY. Several samplers share the sessions. Ends with Ctrl-C.
    """
    import asyncio
    import os

    from etude.runtime.gateway_service import ADMIN_KEY_VARIABLE, serve_gateway

    serving = serve_gateway(
        model,
        samplers,
        renderer=renderer,
        admin_key=os.environ.pop(ADMIN_KEY_VARIABLE, ""),
        port=port,
        control_port=control_port,
        say=lambda line: click.echo(line),
    )
    asyncio.run(serving)
    return 0


@gateway.command(epilog="Example: etude gateway drain http://127.0.0.1:8300")
@click.argument("sampler", metavar="URL")
def drain(sampler: str) -> int:
    """Tell the sampler at URL to want no new sessions; those that it has go on with it."""
    import asyncio

    from etude.sampling.client import SamplerClient

    async def tell() -> None:
        async with SamplerClient(sampler) as client:
            await client.leave()

    asyncio.run(tell())
    click.echo(f"{sampler} wants no new sessions")
    return 0
