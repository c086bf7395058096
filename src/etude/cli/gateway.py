"""`etude gateway`: what the gateway would do with a model, without a run."""

from pathlib import Path

import click


@click.group(epilog="Example: etude gateway check models/Qwen3-8B")
def gateway() -> None:
    """Check how conversations become tokens."""


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
