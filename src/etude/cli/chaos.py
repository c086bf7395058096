"""`etude chaos`: a recipe must not notice that its processes are killed."""

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from etude.cli.options import settings_options
from etude.cli.verify import EXIT_VIOLATED

if TYPE_CHECKING:
    from etude.runtime.chaos import ChaosReport
    from etude.runtime.settings import Settings

_DISK_MB = 1024


@click.command(epilog="Example: etude chaos recipes/quickstart.toml --kills 50 --seed 1 --set run.url=runs/chaos-1")
@click.option("--kills", type=click.IntRange(min=0), default=20, show_default=True, help="Processes to kill.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides who is killed, in which order.")
@click.option(
    "--pause",
    type=click.FloatRange(min=0.0, min_open=True),
    default=2.0,
    show_default=True,
    help="Mean seconds between a recovery and the next kill.",
)
@click.option(
    "--full-disks",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Times to fill the disk. The run then lies on a small file system in memory until it ends; needs root.",
)
@click.option(
    "--store-failures",
    type=click.FloatRange(min=0.0, max=0.9),
    default=0.0,
    show_default=True,
    help="Share of the store's calls that fail; the run directory is then used like a bucket.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@settings_options
def chaos(
    settings: "Settings", *, kills: int, seed: int, pause: float, full_disks: int, store_failures: float, as_json: bool
) -> int:
    """Run a recipe while killing its processes, then verify the run.

    Trainer, samplers, sandboxes, their launcher and the controller, which hosts gateway and worker, are killed with
    SIGKILL, each kind equally often. A run that ends is started again, as its user would. The exit code is that of
    `etude verify`. The run's own output goes to RUN.log.
    """
    import msgspec

    from etude.dashboard.run_view import open_run
    from etude.errors import ConfigError
    from etude.runtime.audit.audit import audit
    from etude.runtime.audit.text import report_text
    from etude.runtime.chaos import Chaos, ChaosPlan
    from etude.runtime.settings import resolved_toml
    from etude.runtime.small_disk import small_disk

    url = settings.config.run.url
    if "://" in url:
        msg = f"run.url {url!r}: chaos needs a local directory; set run.url to a path"
        raise ConfigError(msg)
    place = Path(url).absolute()
    attacked = f"faulty+file://{place}?fail={store_failures}" if store_failures else str(place)
    with ExitStack() as stack:
        recipe = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="etude-chaos-"))) / "recipe.toml"
        recipe.write_text(resolved_toml(settings))
        if full_disks:
            stack.enter_context(small_disk(place, megabytes=_DISK_MB))
        log = place.with_name(f"{place.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        # The budget of restarts is for processes that fail by themselves.
        overrides = (f"run.url={attacked}", f"supervision.restarts={kills + 5}")
        command = [sys.executable, "-m", "etude.cli.main", "run", str(recipe)]
        command += [part for override in overrides for part in ("--set", override)]
        plan = ChaosPlan(kills=kills, seed=seed, pause_s=pause, full_disks=full_disks)
        report = asyncio.run(Chaos(command, plan, place=place, log=log).run())
        audited = asyncio.run(audit(open_run(str(place)), run=str(place), quick=False, seal=""))
    if as_json:
        click.echo(msgspec.json.encode({"chaos": report, "verify": audited}))
    else:
        click.echo(f"{_text(report)}\n{report_text(audited)}")
    return 0 if audited.holds else EXIT_VIOLATED


def _text(report: "ChaosReport") -> str:
    kills = ", ".join(f"{kind} {count} times" for kind, count in sorted(report.kills.items()))
    recovery = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in sorted(report.recovery_s.items()))
    lines = (
        f"killed: {kills or 'nothing'}; filled the disk {report.full_disks} times",
        f"the run was finished after {report.seconds:.0f} s and {report.starts} starts of its command",
        f"longest wait until a next victim was up: {recovery or 'none'}",
    )
    return "\n".join(lines)
