"""`etude verify`: whether a run is what it claims."""

import asyncio

import click

EXIT_VIOLATED = 5


@click.command(epilog="Example: etude verify runs/quickstart")
@click.argument("run", metavar="RUN")
@click.option("--quick", is_flag=True, help="Do not rebuild every policy version from its objects.")
@click.option("--seal", default="", metavar="CHAIN", help="Chain value that the run was sealed with, noted earlier.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(run: str, *, quick: bool, seal: str, as_json: bool) -> int:
    """Replay the ledger of the run in directory or bucket RUN and check that what it claims holds.

    Reads only. Ends with 0 if every invariant holds, and with 5 if one does not. A run that goes on, or was killed, is
    checked for what must hold already.
    """
    import msgspec

    from etude.dashboard.run_view import open_run
    from etude.runtime.audit.audit import audit
    from etude.runtime.audit.text import report_text

    report = asyncio.run(audit(open_run(run), run=run, quick=quick, seal=seal))
    click.echo(msgspec.json.encode(report) if as_json else report_text(report))
    return 0 if report.holds else EXIT_VIOLATED
