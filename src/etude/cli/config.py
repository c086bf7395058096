"""`etude config`: what a run would be told."""

import json
from typing import TYPE_CHECKING

import click

from etude.cli.options import print_settings, settings_options

if TYPE_CHECKING:
    from etude.runtime.settings import Settings


@click.group(epilog="Example: etude config show recipes/quickstart.toml --set trainer.lr=1e-5")
def config() -> None:
    """Print a resolved configuration, or its schema."""


@config.command(epilog="Example: etude config show recipes/quickstart.toml --set pools.0.view=bf16")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with `config` and `provenance`.")
@settings_options
def show(settings: "Settings", *, as_json: bool) -> None:
    """Print every value of CONFIG with its origin: default, file, environment variable or --set."""
    print_settings(settings, as_json=as_json)


@config.command(epilog="Example: etude config schema > etude.schema.json")
def schema() -> None:
    """Print the JSON Schema of a configuration file, for editors."""
    from etude.runtime.settings import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
