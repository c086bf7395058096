"""`etude weights verify` and `gc`."""

import asyncio
from typing import TYPE_CHECKING

import click

from etude.cli.weights_options import chain_options, size_text

if TYPE_CHECKING:
    from etude.interfaces import Bucket
    from etude.weights.chain import ChainKeys

EXIT_VIOLATED = 5


@click.command(epilog="Example: etude weights verify runs/quickstart")
@chain_options
def verify(store: "Bucket", keys: "ChainKeys", *, as_json: bool) -> int:
    """Rebuild every version that is kept, by every way that leads to it, and check all digests.

    Ends with 0 if all are what they claim, and with 5 if one is not. Needs memory for a few versions.
    """
    import msgspec

    from etude.weights.inspection import inspect

    report = asyncio.run(inspect(store, keys=keys))
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        for problem in report.problems:
            start = "an anchor" if problem.base is None else f"version {problem.base}"
            click.echo(f"{problem.lineage}/{problem.version} from {start}: {problem.what}")
        click.echo(
            f"{report.versions} versions, {report.routes} ways to them, {size_text(report.num_bytes)}: "
            f"{len(report.problems)} problems"
        )
    return EXIT_VIOLATED if report.problems else 0


@click.command(epilog="Example: etude weights gc s3://bucket/run --keep 3 --dry-run")
@chain_options
@click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Newest anchors to keep.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Seconds between raising the floor and deleting below it.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and change nothing.")
def gc(store: "Bucket", keys: "ChainKeys", *, as_json: bool, keep: int, grace_s: float, dry_run: bool) -> None:
    """Delete the versions that neither the newest anchors nor a reader with a live lease need.

    May be interrupted, and run while the run goes on. Never run two at once.
    """
    import msgspec

    from etude.telemetry.clock import SystemClock
    from etude.weights.retention import collect

    work = collect(store, clock=SystemClock(), keys=keys, keep=keep, grace_s=grace_s, dry_run=dry_run)
    found = asyncio.run(work)
    if found is None:
        click.echo("{}" if as_json else "nothing is published")
        return
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    if dry_run:
        for key in found.deleted:
            click.echo(key)
    done = "would be deleted" if dry_run else "deleted"
    click.echo(
        f"floor {found.lineage}/{found.floor}, {found.readers} readers: {found.kept} objects kept, "
        f"{len(found.deleted)} {done}, {found.waiting} that nothing leads to wait for their day"
    )
