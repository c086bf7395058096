"""`etude weights ls`, `log` and `diff`."""

import asyncio
from typing import TYPE_CHECKING

import click

from etude.cli.weights_options import chain_options, size_text

if TYPE_CHECKING:
    from etude.interfaces import Bucket
    from etude.weights.chain import ChainKeys
    from etude.weights.comparison import TensorChange
    from etude.weights.history import LogRow, VersionRow


@click.command(epilog="Example: etude weights ls runs/quickstart")
@chain_options
def ls(store: "Bucket", keys: "ChainKeys", *, as_json: bool) -> None:
    """List the versions that can be read, with every way to them and its bytes."""
    import msgspec

    from etude.weights.history import list_versions

    for row in asyncio.run(list_versions(store, keys=keys)):
        click.echo(msgspec.json.encode(row) if as_json else _version_line(row))


@click.command(epilog="Example: etude weights log runs/quickstart --last 5")
@chain_options
@click.option("--last", type=click.IntRange(min=1), default=50, show_default=True, help="How many to print at most.")
def log(store: "Bucket", keys: "ChainKeys", *, as_json: bool, last: int) -> None:
    """Print the history of the weights, the newest version first."""
    import msgspec

    for row in asyncio.run(_newest(store, keys, last)):
        click.echo(msgspec.json.encode(row) if as_json else _log_line(row))


@click.command(epilog="Example: etude weights diff runs/quickstart 12 head")
@chain_options
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
def diff(store: "Bucket", keys: "ChainKeys", *, as_json: bool, old: str, new: str) -> None:
    """Say which tensors changed from version OLD to NEW, how many of their weights, and by how much.

    A version is head, a number in the head's lineage, or lineage/number. Distances are in units in the last place.
    """
    import msgspec

    changes, num_bytes = asyncio.run(_changes(store, keys, old, new))
    for change in changes:
        row = msgspec.structs.asdict(change) | {"density": change.density}
        click.echo(msgspec.json.encode(row) if as_json else _change_line(change))
    if not as_json:
        elements, changed = sum(change.elements for change in changes), sum(change.changed for change in changes)
        share = changed / elements if elements else 0.0
        travels = f"; the cheapest way between them has {size_text(num_bytes)}" if num_bytes else ""
        click.echo(f"{len(changes)} tensors changed, {changed} of their {elements} weights ({share:.4%}){travels}")


async def _newest(store: "Bucket", keys: "ChainKeys", last: int) -> "list[LogRow]":
    from contextlib import aclosing

    from etude.weights.history import log_versions

    rows: list[LogRow] = []
    async with aclosing(log_versions(store, keys=keys)) as history:
        async for row in history:
            rows.append(row)
            if len(rows) == last:
                break
    return rows


async def _changes(store: "Bucket", keys: "ChainKeys", old: str, new: str) -> "tuple[list[TensorChange], int]":
    from etude.weights.comparison import compare
    from etude.weights.history import bytes_between, find_version
    from etude.weights.reader import load_version

    (old_lineage, old_version), (new_lineage, new_version) = [
        await find_version(store, name, keys=keys) for name in (old, new)
    ]
    before = await load_version(store, lineage=old_lineage, version=old_version, keys=keys)
    after = await load_version(store, lineage=new_lineage, version=new_version, keys=keys)
    num_bytes = await bytes_between(store, before.held, (new_lineage, new_version), keys=keys)
    return compare(before.tensors, after.tensors), num_bytes


def _version_line(row: "VersionRow") -> str:
    ways = ", ".join(
        f"{way.kind}{f' from {way.base}' if way.kind == 'skip' else ''} {size_text(way.num_bytes)}" for way in row.ways
    )
    return f"{row.lineage}/{row.version}: {ways}{'  <- head' if row.is_head else ''}"


def _log_line(row: "LogRow") -> str:
    anchor = f", anchor {size_text(row.anchor_bytes)}" if row.anchor_bytes else ""
    parent = f", after {row.parent}" if row.parent and row.parent != f"{row.lineage}/{row.version - 1}" else ""
    return (
        f"{row.lineage}/{row.version}: step {row.step}, epoch {row.epoch}, {size_text(row.num_bytes)}{anchor}{parent}, "
        f"{row.digest[:16]}"
    )


def _change_line(change: "TensorChange") -> str:
    if change.kind != "changed":
        return f"{change.name}: {change.kind}, {change.dtype} {list(change.shape)}"
    moved = f"1 ulp {change.by_1}, 2 ulp {change.by_2}, 3-8 ulp {change.by_8}, more {change.by_more}"
    return f"{change.name}: {change.changed} of {change.elements} ({change.density:.4%}); {moved}"
