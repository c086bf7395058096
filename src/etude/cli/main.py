"""The `etude` command.

A command's module is imported when the command is called, so that `etude --help` answers at once.

Exit codes: 0 it worked; 1 the run failed; 2 what was asked for is wrong (usage, configuration, task, model directory);
3 a gate failed; 4 this machine, a store or the harness cannot do it; 5 a run is not what it claims; 130 interrupted.
See docs/exit-codes.md.
"""

import errno
import importlib
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, cast

import click

from etude.errors import EtudeError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HOST = 4
EXIT_INTERRUPTED = 130


class Entry(NamedTuple):
    """A command that is imported when it is called."""

    target: str
    """`module:attribute` of the click command."""
    summary: str = ""
    hidden: bool = False


COMMANDS = {
    "run": Entry("etude.cli.stages:run", "Go through all stages of a recipe; run it again to resume."),
    "pretrain": Entry("etude.cli.stages:pretrain", "Train a policy from nothing on the task family's sources."),
    "sft": Entry("etude.cli.stages:sft", "Train the policy on scripted demonstrations."),
    "train": Entry("etude.cli.stages:train", "Train the policy by reinforcement learning in its harness."),
    "eval": Entry("etude.cli.stages:evaluate", "Measure the pass rate on held-out tasks."),
    "status": Entry("etude.cli.status:status", "Say how far a run is."),
    "show": Entry("etude.cli.show:show", "Read a run's rollouts turn by turn."),
    "doctor": Entry("etude.cli.doctor:doctor", "Find out what ails this machine or a run."),
    "verify": Entry("etude.cli.verify:verify", "Check that a run is what it claims."),
    "chaos": Entry("etude.cli.chaos:chaos", "Run a recipe while killing its processes, then verify it."),
    "tasks": Entry("etude.cli.tasks:tasks", "Check task directories."),
    "weights": Entry("etude.cli.weights:weights", "Read the versions that a run publishes; keep any engine current."),
    "gateway": Entry("etude.cli.gateway:gateway", "Check how conversations become tokens."),
    "config": Entry("etude.cli.config:config", "Print a resolved configuration, or its schema."),
    "serve-deriver": Entry("etude.cli.stages:serve_deriver", hidden=True),
    "serve-sampler": Entry("etude.cli.stages:serve_sampler", hidden=True),
    "serve-trainer": Entry("etude.cli.stages:serve_trainer", hidden=True),
}

EXTRAS = {
    "numpy": "train",
    "safetensors": "train",
    "torch": "train",
    "transformers": "train",
    "ray": "ray",
    "vllm": "vllm",
}
"""The extra of this package that brings a module which the core does without."""

HOST_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again, it resumes",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again, it resumes",
    errno.EADDRINUSE: "the port is in use; stop the process that holds it, or choose another port",
    errno.EMFILE: "too many open files; raise the limit with ulimit -n",
}
"""What to say and do about errors of the operating system that no command can repair."""


class LazyGroup(click.Group):
    """A group whose commands are looked up in `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command that was called."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items() if not entry.hidden])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or fail with the name that was probably meant."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            visible = {name: click.Command(name) for name, entry in COMMANDS.items() if not entry.hidden}
            raise click.exceptions.NoSuchCommand(args[0], possibilities=visible, ctx=ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: etude run recipes/quickstart.toml",
)
@click.version_option(package_name="etude")
@click.option("--traceback", "show_traceback", is_flag=True, help="Print the whole traceback of an unexpected error.")
@click.pass_context
def cli(context: click.Context, *, show_traceback: bool) -> None:
    """Train your own agent model by reinforcement learning, inside its own unchanged harness."""
    del context
    if show_traceback:
        sys.excepthook = sys.__excepthook__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, which is what the command returned if that was a number.

    Everything that is expected to fail becomes one message on stderr.
    """
    sys.excepthook = report_unexpected
    try:
        code = cli.main(arguments, prog_name="etude", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except ExceptionGroup as group:
        return _explain(_first(group))
    except (EtudeError, OSError, ModuleNotFoundError) as error:
        return _explain(error)
    return code if isinstance(code, int) else 0


def report_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in one line what nobody expected, and where its traceback was written; an `excepthook`."""
    with tempfile.NamedTemporaryFile("w", prefix="etude-", suffix=".log", delete=False) as log:
        traceback.print_exception(kind, error, trace, file=log)
    first_line = next(iter(str(error).splitlines()), "")
    click.echo(f"error: unexpected {kind.__name__}: {first_line}", err=True)
    click.echo(f"The traceback is in {log.name}; please report it. With etude --traceback it is printed.", err=True)


def _explain(error: BaseException) -> int:
    """Print what is known of an error and return the exit code; raise it again when nothing is."""
    if isinstance(error, EtudeError):
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in HOST_ERRORS:
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {place}{HOST_ERRORS[error.errno]}", err=True)
        return EXIT_HOST
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        click.echo(f"error: this needs the module {error.name}; install it with pip install 'etude[{extra}]'", err=True)
        return EXIT_HOST
    raise error


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the error of a group that a user can act on, if there is one, else the group."""
    known, _ = group.split((EtudeError, OSError, ModuleNotFoundError))
    error: Exception | None = known
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error or group


if __name__ == "__main__":
    sys.exit(main())
