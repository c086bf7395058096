# pyright: basic
import json

import click
from click.testing import CliRunner

from etude.cli.options import config_options


@click.command()
@click.option("--fast", is_flag=True)
@config_options
def play(settings, *, as_json, fast):
    click.echo(json.dumps([settings.config.trainer.steps, as_json, fast]))
    return 1


def invoke(tmp_path, *arguments):
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nsteps = 7\n")
    return CliRunner().invoke(play, [str(file), *arguments], standalone_mode=False)


def test_a_command_gets_its_settings_and_its_own_options_and_returns_its_exit_code(tmp_path):
    ended = invoke(tmp_path, "--set", "trainer.steps=9", "--json", "--fast")
    assert json.loads(ended.output) == [9, True, True]
    assert ended.return_value == 1


def test_a_dry_run_prints_the_configuration_and_does_not_call_the_command(tmp_path):
    ended = invoke(tmp_path, "--dry-run", "--set", "trainer.lr=0.5")
    assert "lr = 0.5  # --set" in ended.output.splitlines()
    assert ended.return_value == 0
    assert json.loads(invoke(tmp_path, "--dry-run", "--json").output)["config"]["trainer"]["steps"] == 7


def test_a_wrong_override_stops_before_the_command(tmp_path):
    ended = invoke(tmp_path, "--set", "trainer.stepz=9")
    assert "did you mean trainer.steps?" in str(ended.exception)
    assert not ended.output
