"""What ends a block when a part that the block relies on ends."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, cast

from etude.errors import EtudeError
from etude.telemetry.clock import wall_time
from etude.telemetry.waits import current_waits

_KNOWN_WITHIN_S = 1.0


class Watched(Protocol):
    """A part of the run: a process, a task."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    async def watch(self) -> None:
        """Wait until the part ends, which it should not, and raise why."""
        ...


@asynccontextmanager
async def watching(parts: Sequence[Watched]) -> AsyncGenerator[None]:
    """Run the block as long as no part ends; the first that does cancels the block and is what is raised.

    An error of the block itself is replaced by the end of the part that explains it, such as a broken connection by the
    last words of the process at its other end.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(part.watch(), name=f"watch {part.name}") for part in parts]
            yield
            for watch in watches:
                watch.cancel()
    except ExceptionGroup as errors:
        cause = await _ended(parts)
        if cause is not None:
            raise cause from errors
        raise _only(errors) from None


async def _ended(parts: Sequence[Watched]) -> EtudeError | None:
    """Return why a part ended; a connection breaks a moment before the process that held it is known to be gone."""

    async def ended(part: Watched) -> None:
        async with asyncio.timeout(_KNOWN_WITHIN_S):
            await part.watch()

    found = await asyncio.gather(*map(ended, parts), return_exceptions=True)
    return next((error for error in found if isinstance(error, EtudeError)), None)


@asynccontextmanager
async def telling_waits(note: Callable[[str], None], *, after_s: float = 5.0) -> AsyncGenerator[None]:
    """Say, every `after_s` seconds, what the block has been waiting for so long."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(after_s)
            now = wall_time()
            for wait in current_waits():
                if now - wait.since >= after_s / 2:
                    note(
                        f"still waiting for {wait.name} on {wait.on}: {now - wait.since:.0f} s, "
                        f"for {wait.until - now:.0f} s more at most"
                    )

    telling = asyncio.create_task(tell(), name="tell what is waited for")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})
    if not telling.cancelled():
        telling.result()


def _only(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the one error of a group, however deep, or the group when there are several."""
    first, *others = errors.exceptions
    if others or not isinstance(first, ExceptionGroup):
        return errors if others else first
    return _only(cast("ExceptionGroup[Exception]", first))
