"""The commands that work on a run: `run` goes through all stages, the others are one stage each."""

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import click

from etude.cli.options import config_options

if TYPE_CHECKING:
    from etude.policy.views import View
    from etude.runtime.settings import Settings
    from etude.runtime.stages import Stage

EXIT_INTERRUPTED = 130


@click.command(epilog="Example: etude run recipes/quickstart.toml --set run.seed=1 --set run.url=runs/seed-1")
@config_options
def run(settings: "Settings", *, as_json: bool) -> int:
    """Go through all stages of a recipe, in the order of its `stages`.

    Stages that are done are not repeated: run the same command again to resume.
    """
    from etude.runtime.stages import planned

    return _stages(settings, planned(settings.config), as_json=as_json)


@click.command(epilog="Example: etude pretrain recipes/quickstart.toml")
@config_options
def pretrain(settings: "Settings", *, as_json: bool) -> int:
    """Train a policy from nothing on the task family's sources."""
    return _stages(settings, ("pretrain",), as_json=as_json)


@click.command(epilog="Example: etude sft recipes/quickstart.toml --set sft.epochs=3")
@config_options
def sft(settings: "Settings", *, as_json: bool) -> int:
    """Train the policy on scripted demonstrations of mixed quality."""
    return _stages(settings, ("sft",), as_json=as_json)


@click.command(epilog="Example: etude train recipes/quickstart.toml --set trainer.lr=1e-4")
@config_options
def train(settings: "Settings", *, as_json: bool) -> int:
    """Train the policy by reinforcement learning in its harness; run it again to resume."""
    return _stages(settings, ("train",), as_json=as_json)


@click.command("eval", epilog="Example: etude eval recipes/quickstart.toml --set eval.attempts=8")
@config_options
def evaluate(settings: "Settings", *, as_json: bool) -> int:
    """Measure the newest version's pass rate on the held-out tasks."""
    return _stages(settings, (), as_json=as_json)


@click.command("serve-sampler", hidden=True, epilog="Example: etude serve-sampler runs/quickstart --pool exact")
@click.argument("run_url")
@click.option("--pool", required=True, help="Name of the pool.")
@click.option("--index", default=0, help="Which of the pool's replicas.")
def serve_sampler(run_url: str, pool: str, index: int) -> None:
    """Serve a policy's tokens until standard input closes."""
    from etude.runtime.sampler_process import serve_sampler as serve

    asyncio.run(serve(run_url, pool, index))


@click.command("serve-deriver", hidden=True, epilog="Example: etude serve-deriver runs/quickstart --view fp8")
@click.argument("run_url")
@click.option("--view", required=True, help="Precision to derive.")
def serve_deriver(run_url: str, view: "View") -> None:
    """Publish a view of every version of a run until standard input closes."""
    from etude.runtime.deriver_process import serve_deriver as serve

    asyncio.run(serve(run_url, view))


@click.command("serve-trainer", hidden=True, epilog="Example: etude serve-trainer runs/quickstart")
@click.argument("run_url")
def serve_trainer(run_url: str) -> None:
    """Serve a run's trainer until standard input closes."""
    from etude.runtime.trainer_process import serve_trainer as serve

    asyncio.run(serve(run_url))


def _stages(settings: "Settings", stages: "tuple[Stage, ...]", *, as_json: bool) -> int:
    """Run stages, or evaluate the newest version when there are none; return the exit code."""
    # Read by the numerical libraries when they are loaded: threads that spin while they wait would take the core from
    # the run's other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from etude.gateway.collector import collect_rarely
    from etude.runtime.stages import Drained, open_stages
    from etude.telemetry.console import open_console

    console = open_console("json" if as_json else "auto", sys.stdout)
    url = settings.config.run.url

    async def work() -> None:
        async with open_stages(settings, console) as runner:
            await (runner.run(stages) if stages else runner.evaluate_now())

    collect_rarely()
    try:
        asyncio.run(work())
    except Drained:
        console.note(f"stopped in order; run the same command again to resume {url}")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        console.note(f"interrupted; run the same command again to resume {url}")
        return EXIT_INTERRUPTED
    console.note(f"report: {url}/report.html; next: etude show {url}")
    return 0
