"""`etude show`: a run's rollouts, turn by turn."""

import asyncio

import click


@click.command(epilog="Example: etude show runs/quickstart g000012/3")
@click.argument("run", metavar="RUN")
@click.argument("rollout", required=False)
@click.option("--last", type=click.IntRange(min=1), default=50, show_default=True, help="How many to list at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def show(run: str, rollout: str | None, *, last: int, as_json: bool) -> None:
    """List rollouts of the run in directory RUN, those of one group, or print one turn by turn.

    ROLLOUT is a name from the list such as g000012/3, or a group such as g000012.
    """
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
