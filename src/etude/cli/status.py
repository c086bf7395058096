"""`etude status`: how far a run is."""

import asyncio

import click


@click.command(epilog="Example: etude status runs/quickstart")
@click.argument("run", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(run: str, *, as_json: bool) -> None:
    """Say how far the run in directory RUN is, and what to do next."""
    import msgspec

    from etude.dashboard.run_view import load_run, open_run
    from etude.dashboard.summary import status_of, status_text
    from etude.telemetry.clock import wall_time

    found = status_of(asyncio.run(load_run(open_run(run))), run=run, now=wall_time())
    click.echo(msgspec.json.encode(found) if as_json else status_text(found))
