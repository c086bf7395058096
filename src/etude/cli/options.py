"""Options that several commands share."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from etude.runtime.settings import Settings

Command = Callable[..., int | None]
"""What click calls; a returned number is the exit code."""


def settings_options(command: Command) -> Command:
    """Add CONFIG and `--set` to a command, which is called with the loaded settings first."""

    @click.argument("file", metavar="CONFIG", type=click.Path(path_type=Path))
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a value: --set trainer.lr=1e-5. Repeatable.",
    )
    @functools.wraps(command)
    def with_settings(*, file: Path, overrides: tuple[str, ...], **options: object) -> int | None:
        from etude.runtime.settings import load_settings

        return command(load_settings(file, overrides, os.environ), **options)

    return with_settings


def config_options(command: Command) -> Command:
    """Add CONFIG, `--set`, `--dry-run` and `--json` to a command that works on a run.

    The command is called as `command(settings, as_json=...)`, plus its own options. With `--dry-run` it is not called:
    the resolved configuration is printed with the origin of each value.
    """

    @click.option("--dry-run", is_flag=True, help="Print the resolved configuration and where each value came from.")
    @click.option("--json", "as_json", is_flag=True, help="Print for machines: one JSON object per line.")
    @settings_options
    @functools.wraps(command)
    def with_config(settings: "Settings", *, dry_run: bool, as_json: bool, **options: object) -> int | None:
        if dry_run:
            print_settings(settings, as_json=as_json)
            return 0
        return command(settings, as_json=as_json, **options)

    return with_config


def print_settings(settings: "Settings", *, as_json: bool) -> None:
    """Print a configuration with the origin of each value, as TOML or as one JSON object."""
    from etude.runtime.settings import resolved_toml

    if as_json:
        content = {"config": settings.config.model_dump(mode="json"), "provenance": settings.provenance}
        click.echo(json.dumps(content))
    else:
        click.echo(resolved_toml(settings), nl=False)
