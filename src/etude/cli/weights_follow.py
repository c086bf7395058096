"""`etude weights follow` and `materialise`: a chain as a plain model directory."""

import asyncio
import contextlib
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from etude.cli.weights_options import chain_options

if TYPE_CHECKING:
    from etude.interfaces import Bucket
    from etude.weights.chain import ChainKeys
    from etude.weights.directory import DirectoryState
    from etude.weights.replica import ReplicaOptions

_NO_LEASE = click.option(
    "--no-lease",
    is_flag=True,
    help="Write nothing to the store, for who may only read: `gc` then waits no longer than its --grace.",
)


@click.command(
    epilog="Example: etude weights follow s3://bucket/run --to model/ --json | while read line; do ...; done"
)
@chain_options
@click.option(
    "--to", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="The model directory."
)
@click.option("--once", is_flag=True, help="Bring it to the newest version and end.")
@click.option(
    "--poll",
    "poll_s",
    type=click.FloatRange(min=0.05),
    default=2.0,
    show_default=True,
    help="Seconds between looks at the head.",
)
@click.option(
    "--files-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model directory whose config and tokenizer are copied into an empty one.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory in which the replicas of this host share their downloads.",
)
@click.option("--cluster", default="", help="Readers that name the same cluster share downloads over HTTP.")
@click.option(
    "--listen",
    default="127.0.0.1",
    show_default=True,
    metavar="IP",
    help="Where --cluster serves objects to the others.",
)
@click.option("--reader", default="", help="Name of this reader's lease, which no other has; a random one by default.")
@_NO_LEASE
def follow(
    store: "Bucket",
    keys: "ChainKeys",
    *,
    as_json: bool,
    folder: Path,
    once: bool,
    poll_s: float,
    files_from: Path | None,
    cache: Path | None,
    cluster: str,
    listen: str,
    reader: str,
    no_lease: bool,
) -> None:
    """Keep a Hugging Face model directory at the newest version that the run at URL publishes.

    The weights change in place. A line is printed whenever another version is complete; `etude.version` in the
    directory names it. Killed at any moment and started again, the directory is at the old version or at the new one.
    """
    from etude.weights.replica import ReplicaOptions, copy_files

    if files_from is not None:
        copy_files(files_from, folder)
    options = ReplicaOptions(
        folder=folder,
        poll_s=poll_s,
        cache=cache,
        cluster=cluster,
        listen=listen,
        reader=reader,
        leased=not no_lease,
    )
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_follow(store, keys, options, once=once, as_json=as_json))


@click.command(epilog="Example: etude weights materialise runs/quickstart head --to model/ --files-from base-model/")
@chain_options
@click.argument("version", metavar="VERSION")
@click.option(
    "--to", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="The model directory."
)
@click.option(
    "--files-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model directory whose config and tokenizer are copied.",
)
@_NO_LEASE
def materialise(
    store: "Bucket",
    keys: "ChainKeys",
    *,
    as_json: bool,
    version: str,
    folder: Path,
    files_from: Path | None,
    no_lease: bool,
) -> None:
    """Write one VERSION as a Hugging Face model directory: head, a number in the head's lineage, or lineage/number."""
    import msgspec

    from etude.telemetry.clock import SystemClock
    from etude.weights.replica import copy_files, materialised

    if files_from is not None:
        copy_files(files_from, folder)
    state = asyncio.run(materialised(store, keys, version, folder, clock=SystemClock(), leased=not no_lease))
    click.echo(msgspec.json.encode(state) if as_json else f"{folder} is {_text(state)}")


async def _follow(store: "Bucket", keys: "ChainKeys", options: "ReplicaOptions", *, once: bool, as_json: bool) -> None:
    import msgspec

    from etude.telemetry.clock import SystemClock
    from etude.weights.replica import follow_into

    _end_on_sigterm()

    def report(error: Exception) -> None:
        click.echo(f"cannot follow, keeping what is there: {error}", err=True)

    following = follow_into(store, keys, options, clock=SystemClock(), once=once, report=report)
    async with aclosing(following) as states:
        async for state in states:
            click.echo(msgspec.json.encode(state) if as_json else f"{options.folder} is {_text(state)}")
            sys.stdout.flush()


def _end_on_sigterm() -> None:
    """Let a service manager end the command as Ctrl-C does: after the step under way, with the lease given back."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _text(state: "DirectoryState") -> str:
    return f"version {state.version} (step {state.step}, lineage {state.lineage}, {state.digest[:16]})"
