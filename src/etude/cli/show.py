"""`etude show`: a run's rollouts, as a tree and turn by turn."""

import asyncio

import click


@click.command(epilog="Example: etude show runs/quickstart g000012/3")
@click.argument("run", metavar="RUN")
@click.argument("rollout", required=False)
@click.option("--last", type=click.IntRange(min=1), default=50, show_default=True, help="How many to list at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--trace", is_flag=True, help="Print the tokens that are trained on, one OpenEnv training trace per line."
)
def show(run: str, rollout: str | None, *, last: int, as_json: bool, trace: bool) -> None:
    """List rollouts of the run in directory RUN, those of one group, or print one: its calls as a tree, then its turns.

    ROLLOUT is a name from the list such as g000012/3, or a group such as g000012.
    """
    if trace:
        _print_traces(run, rollout)
        return
    import msgspec

    from etude.dashboard.run_view import load_rollouts, open_run, rollout_names
    from etude.dashboard.summary import chosen, rollout_line, rollout_text_line
    from etude.dashboard.transcript import rollout_text
    from etude.telemetry.lines import printable

    store = open_run(run)
    with asyncio.Runner() as runner:
        found = chosen(runner.run(rollout_names(store)), rollout)
        view = runner.run(load_rollouts(store, found[-last:]))
    for problem in view.unreadable:
        click.echo(printable(f"unreadable: {problem}"), err=True)
    if found == [rollout]:
        for one in view.rollouts:
            click.echo(msgspec.json.encode(one.document) if as_json else rollout_text(one), nl=as_json)
        return
    for one in view.rollouts:
        line = rollout_line(one)
        click.echo(msgspec.json.encode(line) if as_json else rollout_text_line(line))
    if len(found) > last and not as_json:
        click.echo(f"{last} of {len(found)} rollouts; --last {len(found)} lists all")


def _print_traces(run: str, rollout: str | None) -> None:
    import msgspec

    from etude.dashboard.run_view import open_run, rollout_names
    from etude.dashboard.summary import chosen
    from etude.dashboard.traces import load_traces

    if rollout is None:
        msg = "--trace needs a ROLLOUT, or a group; etude show RUN lists them"
        raise click.UsageError(msg)
    store = open_run(run)
    with asyncio.Runner() as runner:
        names = chosen(runner.run(rollout_names(store)), rollout)
        for trace in runner.run(load_traces(store, names)):
            click.echo(msgspec.json.encode(trace))
