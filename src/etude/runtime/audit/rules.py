"""What the configuration promises of every group that is trained on."""

from math import fsum, isclose

import msgspec

from etude.algorithm.advantages import centred, standardised
from etude.config import RunConfig
from etude.runtime.audit.case import Case
from etude.runtime.audit.findings import Tally
from etude.runtime.audit.groups import group_id
from etude.runtime.audit.tickets import steps

_TOLERANCE = 1e-9


def staleness_bounded(case: Case, tally: Tally) -> None:
    """Check the oldest token of each group against the step that it joined, and against its admission."""
    config = case.snapshot.config
    if config is None:
        tally.note("not judged: run.toml cannot be read")
        return
    for lineage, version, _, tickets in steps(case.facts):
        start = version - 1
        for ticket in tickets:
            row = next(
                case.facts.rows(
                    "SELECT oldest, newest, admitted_version FROM group_file WHERE ticket = ? AND problem = ''", ticket
                ),
                None,
            )
            if row is not None:
                place = f"{group_id(ticket)} in {lineage} version {version}"
                tally.check(_too_old(place, row, start, config.rollout.max_staleness))


def _too_old(place: str, row: tuple[int | None, int | None, int], start: int, bound: int) -> str:
    oldest, newest, admitted = row
    if oldest is None or newest is None:
        return ""
    if start - oldest > bound:
        return f"{place}: its oldest token is of version {oldest}, {start - oldest} versions old, {bound} allowed"
    if oldest < admitted:
        return f"{place}: it has a token of version {oldest}, older than version {admitted} at its admission"
    return f"{place}: it has a token of version {newest}, which was not made yet" if newest > start else ""


def advantages_follow_from_rewards(case: Case, tally: Tally) -> None:
    """Compute the advantages of every group file again, over scored rollouts only."""
    config = case.snapshot.config
    if config is None:
        tally.note("not judged: run.toml cannot be read")
        return
    query = "SELECT ticket, rewards, advantages FROM group_file WHERE problem = '' ORDER BY ticket"
    for ticket, rewards, advantages in case.facts.rows(query):
        due = advantages_of(msgspec.json.decode(rewards, type=list[float | None]), config)
        found = msgspec.json.decode(advantages, type=list[float | None])
        same = len(due) == len(found) and all(map(_equal, due, found))
        known = [advantage for advantage in found if advantage is not None]
        if not same:
            tally.check(f"{group_id(ticket)}: advantages {found} do not follow from rewards {rewards}")
        elif len(known) == config.rollout.group_size and abs(fsum(known)) > _TOLERANCE * len(known):
            tally.check(f"{group_id(ticket)}: advantages of a full group add up to {fsum(known):.3g}")
        else:
            tally.check()


def advantages_of(rewards: list[float | None], config: RunConfig) -> list[float | None]:
    """Return what each rollout's advantage must be; None for one without a reward, or in a group without a baseline."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) <= 1:
        return [None for _ in rewards]
    if config.algorithm.advantage == "standardised":
        made = iter(standardised(known))
    else:
        made = iter(centred(known, group_size=config.rollout.group_size))
    return [None if reward is None else next(made) for reward in rewards]


def _equal(due: float | None, found: float | None) -> bool:
    if due is None or found is None:
        return due is found
    return isclose(due, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
