"""Who waits for whom, since when and until when: no wait without an owner, a deadline and a name.

One table per process, because that is what hangs. It can be read at any time and from any thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count

import msgspec

from etude.errors import EtudeError, RunError
from etude.telemetry.clock import wall_time


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is waited for."""

    name: str
    """What for, such as `slot`."""
    owner: str
    """Who waits, such as `admit`."""
    on: str
    """Who can end it, such as `trainer`."""
    since: float
    """Wall-clock seconds."""
    until: float
    """When the waiting ends in an error."""


_numbers = count()
_table: dict[int, Wait] = {}


@asynccontextmanager
async def waiting(
    name: str, *, owner: str, on: str, deadline_s: float, error: Callable[[str], EtudeError] = RunError
) -> AsyncGenerator[None]:
    """List a wait for as long as the block takes; raise `error` with its names when that is over `deadline_s` seconds.

    A `TimeoutError` of the block's own comes through as it is.
    """
    now = wall_time()
    number = next(_numbers)
    _table[number] = Wait(name=name, owner=owner, on=on, since=now, until=now + deadline_s)
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            yield
    except TimeoutError as late:
        if not limit.expired():
            raise
        raise error(f"{owner} waited {deadline_s:g} s for {name}, which {on} did not bring") from late
    finally:
        del _table[number]


def current_waits() -> tuple[Wait, ...]:
    """Return what this process waits for now, the longest wait first."""
    return tuple(_table.copy().values())
