"""Tasks and groups: each admitted in the seeded order, and trained once or lost with a reason."""

import msgspec

from etude.rollout.buffer import Ticket
from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.tickets import steps
from etude.telemetry.events import Admitted, TrainedGroup
from etude.types import Task


def group_id(ticket: int) -> str:
    """Return the name of a ticket's group."""
    return Ticket(number=ticket, task_id="", admitted_version=0).group_id


def tasks_once(case: Case, tally: Tally) -> None:
    """Check that every ticket came to exactly one end, or is still open."""
    _breaches(case, tally, "tasks")
    query = "SELECT ticket, count(*), group_concat(fate, ' and ') FROM fate GROUP BY ticket"
    for ticket, count, fates in case.facts.rows(query):
        tally.check(f"{group_id(ticket)}: it is {fates}" if count > 1 else "")
    forgotten = "SELECT ticket FROM admitted WHERE ticket NOT IN (SELECT ticket FROM fate) ORDER BY ticket"
    for (ticket,) in case.facts.rows(forgotten):
        tally.check(f"{group_id(ticket)}: admitted, and never heard of again")


def tasks_in_order(case: Case, tally: Tally) -> None:
    """Check the tasks admitted against those that the seeded source gives, which anybody can run again."""
    source = case.tasks
    if source is None:
        tally.note("not judged: the training tasks are not on this machine")
        return
    for event in case.facts.control(Admitted):
        assert isinstance(event, Admitted)
        due = source.next_task().task_id
        tally.check("" if event.task == due else f"{group_id(event.ticket)}: task {event.task}, where {due} was due")


def groups_once(case: Case, tally: Tally) -> None:
    """Check each optimizer step: its groups, none twice, and what the trainer says that it trained on."""
    _breaches(case, tally, "groups")
    _breaches(case, tally, "versions")
    size = case.snapshot.config.rollout.groups_per_step if case.snapshot.config else None
    for lineage, version, step, tickets in steps(case.facts):
        place = f"{lineage} version {version}"
        if size is not None and len(tickets) != size:
            tally.violate(f"{place}: its step has {len(tickets)} groups, not {size}")
        if len(set(tickets)) != len(tickets):
            tally.violate(f"{place}: a group is in it twice")
        tally.check(_not_as_trained(case, version, step, tickets, place))
    _never_recorded(case, tally)


def _breaches(case: Case, tally: Tally, rule: str) -> None:
    for (what,) in case.facts.rows("SELECT what FROM breach WHERE rule = ?", rule):
        tally.check(what)


def _not_as_trained(case: Case, version: int, step: int, tickets: list[int], place: str) -> str:
    """Return how the trainer's account of a recorded step differs, if any of its accounts does."""
    due = [group_id(ticket) for ticket in tickets]
    told = list(case.facts.rows("SELECT step, groups FROM trained WHERE version = ?", version))
    if not told:
        return f"{place}: the trainer says nothing of it"
    accounts = [(of, _names(groups)) for of, groups in told]
    # A version that was given up is made again, from other groups: then each account has its own record.
    records = _records(case, version)
    for of, names in accounts:
        if names not in records:
            return f"{place}: the trainer trained on {', '.join(names)}, the controller recorded {', '.join(due)}"
        if of != step:
            return f"{place}: step {step} for the controller, {of} for the trainer"
    return "" if due in [names for _, names in accounts] else f"{place}: the trainer trained on other groups"


def _records(case: Case, version: int) -> list[list[str]]:
    rows = case.facts.rows("SELECT tickets FROM step WHERE version = ?", version)
    return [[group_id(ticket) for ticket in msgspec.json.decode(row, type=list[int])] for (row,) in rows]


def _names(groups: str) -> list[str]:
    return [group.group for group in msgspec.json.decode(groups, type=list[TrainedGroup])]


def _never_recorded(case: Case, tally: Tally) -> None:
    """Find steps of the trainer that no controller recorded; one that was under way is allowed to be."""
    recorded = "SELECT version FROM step WHERE step IS NOT NULL"
    query = f"SELECT version, groups FROM trained WHERE version NOT IN ({recorded})"
    due = {group_id(ticket) for ticket in case.under_way}
    for version, groups in case.facts.rows(query):
        under_way = not case.sealed and all(name in due or _is_late(case, version, name) for name in _names(groups))
        if under_way or _names(groups) in _records(case, version):
            tally.check()
            tally.note("a step that the trainer made and the controller did not record")
        else:
            tally.check(f"version {version}: trained, and no controller recorded the step")


def _is_late(case: Case, version: int, name: str) -> bool:
    return case.behind or case.is_late("taken", f"{version}/{name.removeprefix('g').lstrip('0') or '0'}")


def placeholder_tasks(names: list[str]) -> list[Task]:
    """Return tasks of which only the names are known, which is all that their order depends on."""
    return [Task(task_id=name, path="", digest="", instruction="") for name in names]
