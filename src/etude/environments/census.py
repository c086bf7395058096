"""Which sandboxes live on this host, for other processes than their owner: doctors, chaos, people."""

import msgspec

from etude.environments.commands import children_of
from etude.environments.lease import Lease, leases, start_ticks


class Population(msgspec.Struct, frozen=True, kw_only=True):
    """The sandboxes of one backend."""

    backend: str
    run: str
    """What its owner said they are for."""
    owner: int
    """Process that made the backend."""
    launcher: int
    """Process that starts the sandboxes; 0 while it is being replaced."""
    sandboxes: tuple[int, ...]
    """The first process of each: its end is the end of all others in there."""


def living(run: str | None = None) -> list[Population]:
    """Return the sandboxes of this user whose owners live, of one run or of all; read from /proc at this moment."""
    return [_population(lease) for lease, lives in leases() if lives and run in (None, lease.run)]


def _population(lease: Lease) -> Population:
    launcher = lease.launcher if start_ticks(lease.launcher) == lease.launcher_started else 0
    return Population(
        backend=lease.backend,
        run=lease.run,
        owner=lease.owner,
        launcher=launcher,
        sandboxes=tuple(sorted(children_of(launcher))) if launcher else (),
    )
