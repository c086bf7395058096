"""What the commands about weights share."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from etude.interfaces import Bucket
    from etude.weights.chain import ChainKeys

Command = Callable[..., int | None]


def chain_options(command: Command) -> Command:
    """Add URL, `--view` and `--json`; the command is called as `command(store, keys, as_json=...)`, plus its own."""

    @click.argument("url", metavar="URL")
    @click.option("--view", default="", help="A chain that the run publishes in another precision, such as fp8.")
    @click.option("--json", "as_json", is_flag=True, help="Print for machines: one JSON object per line.")
    @functools.wraps(command)
    def with_chain(*, url: str, view: str, **options: object) -> int | None:
        store, keys = open_chain(url, view)
        return command(store, keys, **options)

    return with_chain


def open_chain(url: str, view: str) -> "tuple[Bucket, ChainKeys]":
    """Return the store of a run that is there already, and where the chain lies in it."""
    from etude.dashboard.run_view import open_run
    from etude.store.opening import open_store
    from etude.weights.chain import WEIGHTS, ChainKeys

    open_run(url)  # refuses a directory that is not there, instead of making it
    return open_store(url), ChainKeys(f"views/{view}") if view else WEIGHTS


def size_text(num_bytes: int) -> str:
    """Return bytes as people read them: 1234 becomes 1.2 kB."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":  # noqa: PLR2004 - SI
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
