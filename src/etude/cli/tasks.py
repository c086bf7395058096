"""`etude tasks`: task directories, before a run relies on them."""

from pathlib import Path

import click


@click.group(epilog="Example: etude tasks lint tasks/")
def tasks() -> None:
    """Check task directories."""


@tasks.command(epilog="Example: etude tasks lint tasks/ --json")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per finding.")
def lint(directory: Path, *, as_json: bool) -> int:
    """Report everything that is wrong with the Harbor task in DIR, or with every task in it.

    Exit code 2 when a task cannot be used; warnings alone are no failure.
    """
    import msgspec

    from etude.tasks.finding import Severity
    from etude.tasks.lint import lint as findings_of

    findings = findings_of(directory)
    for finding in findings:
        click.echo(msgspec.json.encode(finding) if as_json else f"{finding.severity}: {finding.line()}")
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if not as_json:
        click.echo(f"{errors} errors, {len(findings) - errors} warnings")
    return 2 if errors else 0
