"""`etude weights`: the versions that a run publishes."""

import click

from etude.cli import weights_check, weights_derive, weights_follow, weights_forecast, weights_list


@click.group(epilog="Example: etude weights follow s3://bucket/run --to model/")
def weights() -> None:
    """Read the policy versions that a run publishes, and keep any engine current from them."""


for command in (
    weights_follow.follow,
    weights_list.ls,
    weights_list.log,
    weights_list.diff,
    weights_check.verify,
    weights_follow.materialise,
    weights_check.gc,
    weights_derive.derive,
    weights_forecast.forecast,
):
    weights.add_command(command)
