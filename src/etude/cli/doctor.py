"""`etude doctor`: what ails this machine or a run."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from etude.runtime.doctor import Diagnosis

EXIT_UNWELL = 3
EXIT_HOST = 4


@click.command(epilog="Example: etude doctor runs/quickstart")
@click.argument("run", metavar="[RUN]", required=False, default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(run: str, *, as_json: bool) -> int:
    """Check whether this machine can do what a run needs; with RUN, find out what ails that run.

    Of a live run it prints who waits for whom, since when and until when, and which process is silent; of one that
    crashed or ended, how, and what to do. Exit code 0 when all is well, 3 when the run is not, 4 when this machine is
    not.
    """
    import msgspec

    from etude.dashboard.run_view import open_run
    from etude.runtime.directory import RunDirectory
    from etude.runtime.doctor import diagnose_host, diagnose_run
    from etude.telemetry.clock import wall_time

    now = wall_time()
    if run:
        open_run(run)  # refuses a directory that is not there, instead of making it
        work = diagnose_run(RunDirectory.open(run), now=now)
    else:
        work = diagnose_host(Path.cwd(), now=now)
    found = asyncio.run(work)
    click.echo(msgspec.json.encode(found) if as_json else _text(found))
    if not found.is_host_well:
        return EXIT_HOST
    return 0 if found.is_run_well else EXIT_UNWELL


def _text(found: "Diagnosis") -> str:
    """Return a diagnosis as a table of findings, a table of waits, and what to do."""
    from etude.telemetry.lines import printable

    lines = [f"run {found.run} is {found.state}"] if found.run else []
    lines += [
        f"{finding.state:<8} {finding.name:<16} {finding.detail}" + (f" -> {finding.action}" if finding.action else "")
        for finding in (*found.findings, *found.host)
    ]
    if found.waits:
        lines += ["", f"{'who waits':<16} {'for':<24} {'on':<20} {'since':>8} {'at most':>8}"]
        for wait in found.waits:
            times = f"{found.now - wait.since:7.0f}s {wait.until - found.now:7.0f}s"
            lines.append(f"{wait.owner:<16} {wait.name:<24} {wait.on:<20} {times}")
    lines += ["", f"next: {found.next_action}"]
    return "\n".join(map(printable, lines))
