# pyright: basic
import json
import os
import signal
import subprocess
import sys
import textwrap
import tomllib

import pytest
from click.testing import CliRunner

from etude.cli.main import COMMANDS, cli
from etude.config import RunConfig

HEAVY = {"torch", "ray", "transformers", "numpy", "pydantic", "aiohttp", "pyarrow", "obstore", "rich", "asyncio"}


def etude(*arguments, cwd=None, **environ):
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *arguments],
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def python(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def command_that(*lines):
    """A program that calls an own command of etude, registered as all others are."""
    body = textwrap.indent("\n".join(lines), "    ")
    return (
        "import click, errno, sys, threading\n"
        "from etude import errors\n"
        "from etude.cli.main import COMMANDS, Entry, main\n"
        f"@click.command()\ndef own():\n{body}\n"
        "COMMANDS['own'] = Entry('__main__:own')\n"
        "sys.exit(main(['own']))\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["tasks", "--help"], ["config", "show", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    ended = python(f"import sys; from etude.cli.main import main; main({arguments!r}); print('modules:', *sys.modules)")
    assert ended.returncode == 0, ended.stderr
    loaded = set(ended.stdout.partition("modules:")[2].split())
    assert "click" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in HEAVY}


def test_help_lists_every_command_but_those_that_processes_start():
    lines = CliRunner().invoke(cli, ["--help"]).output.splitlines()
    shown = {line.split()[0] for line in lines if line.strip() and line.startswith("  ")}
    assert {name for name, entry in COMMANDS.items() if not entry.hidden} <= shown
    assert "serve-sampler" not in shown


@pytest.mark.parametrize("path", [["config"], ["config", "show"], ["config", "schema"], ["tasks"], ["tasks", "lint"]])
def test_every_command_here_shows_an_example_of_itself(path):
    shown = CliRunner().invoke(cli, [*path, "--help"])
    assert shown.exit_code == 0
    assert f"Example: etude {' '.join(path)}" in shown.output


def test_a_mistyped_command_is_answered_with_the_one_that_was_meant():
    ended = etude("tsks")
    assert ended.returncode == 2
    assert "Did you mean 'tasks'?" in ended.stderr


def test_config_show_prints_what_a_run_would_be_told_and_from_where(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nlr = 1e-4\n")
    ended = etude("config", "show", str(file), "--set", "trainer.steps=3", ETUDE__RUN__SEED="9")
    assert ended.returncode == 0, ended.stderr
    shown = tomllib.loads(ended.stdout)
    assert (shown["trainer"]["lr"], shown["trainer"]["steps"], shown["run"]["seed"]) == (1e-4, 3, 9)
    lines = ended.stdout.splitlines()
    assert {f"lr = 0.0001  # {file}", "steps = 3  # --set", "seed = 9  # ETUDE__RUN__SEED"} <= set(lines)


def test_config_show_for_machines_is_one_object(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("")
    ended = etude("config", "show", str(file), "--json")
    shown = json.loads(ended.stdout)
    assert shown["config"] == RunConfig().model_dump(mode="json")
    assert shown["provenance"]["trainer.lr"] == "default"


def test_config_schema_is_json_schema():
    schema = json.loads(etude("config", "schema").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["properties"]) == set(RunConfig.model_fields)


def test_a_wrong_configuration_ends_with_its_message_and_exit_code_two(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nlrr = 1\n")
    ended = etude("config", "show", str(file))
    assert ended.returncode == 2
    assert ended.stderr == f"error: {file}: trainer.lrr: unknown key; did you mean trainer.lr?\n"
    assert not ended.stdout


def test_tasks_lint_exits_with_two_when_a_task_cannot_be_used(tmp_path):
    task = tmp_path / "broken"
    task.mkdir()
    (task / "instruction.md").write_text("\n")
    ended = etude("tasks", "lint", "broken", cwd=tmp_path)
    assert ended.returncode == 2
    assert "error: broken/instruction.md: is empty" in ended.stdout
    machine = etude("tasks", "lint", "broken", "--json", cwd=tmp_path)
    findings = [json.loads(line) for line in machine.stdout.splitlines()]
    assert {"path", "severity", "message"} <= findings[0].keys()
    assert machine.returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("raise errors.RunError('no sampler came up')", 1, "error: no sampler came up"),
        ("raise errors.PolicyError('models/x: no config.json')", 2, "error: models/x: no config.json"),
        ("raise errors.SandboxError('no namespaces')", 4, "error: no namespaces"),
        ("raise OSError(errno.ENOSPC, 'No space', 'runs/a')", 4, "error: runs/a: the disk is full; free"),
        ("raise OSError(errno.EADDRINUSE, 'in use')", 4, "error: the port is in use; stop"),
        ("import torch.missing", 4, "error: this needs the module torch"),
        ("raise ExceptionGroup('tasks', [ValueError(), errors.RunError('inner')])", 1, "error: inner"),
        ("raise ExceptionGroup('a', [ExceptionGroup('b', [errors.TaskError('deep')])])", 2, "error: deep"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("sys.exit(3)", 3, ""),
        ("click.get_current_context().exit(3)", 3, ""),
        ("return 3", 3, ""),
    ],
)
def test_expected_failures_become_one_message_and_their_exit_code(error, code, message):
    ended = python(command_that(error))
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "error", ["raise ZeroDivisionError('a\\nb')", "raise OSError(errno.EIO, 'x')", "import nonesuch"]
)
def test_an_unexpected_error_is_short_and_says_where_its_traceback_is(error, tmp_path):
    ended = python(command_that(error), TMPDIR=str(tmp_path))
    assert ended.returncode == 1
    first, second, *rest = ended.stderr.splitlines()
    assert first.startswith("error: unexpected")
    assert not rest
    (log,) = tmp_path.glob("etude-*.log")
    assert str(log) in second
    assert "Traceback" in log.read_text()


def test_ctrl_c_ends_with_130():
    code = command_that("print('ready', flush=True)", "threading.Event().wait()")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert "Traceback" not in stderr


def test_the_traceback_is_printed_when_asked_for():
    code = command_that("raise ZeroDivisionError").replace("main(['own'])", "main(['--traceback', 'own'])")
    assert "Traceback (most recent call last)" in python(code).stderr
