"""Writes what a run leaves for people and for resuming, beside the event loop that makes it."""

import asyncio
from collections.abc import Callable, Sequence

from etude.interfaces import ObjectStore
from etude.rollout.record import RolloutRecord, encode_record
from etude.store.groups import encode_group, group_key
from etude.types import Group

_MAX_WAITING = 1 << 14


class Recorder:
    """Puts rollouts and groups into the run directory, in the order they came, in one owned task.

    Use as an async context manager: leaving it writes what is waiting. What went wrong is raised by `watch`, `flush`
    and on leaving.
    """

    name = "recorder"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._queue: asyncio.Queue[tuple[str, Callable[[], bytes]]] = asyncio.Queue(_MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Recorder":
        self._task = asyncio.create_task(self._write(), name="recorder")
        return self

    async def __aexit__(self, *_: object) -> None:
        task = self._task
        assert task is not None
        try:
            await self.flush()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def rollout(self, record: RolloutRecord) -> None:
        """Keep a rollout as an ATIF document."""
        self._queue.put_nowait((record.key, lambda: encode_record(record)))

    def group(self, group: Group, advantages: Sequence[float | None]) -> None:
        """Keep a finished group, under the policy version it was admitted at."""
        key = group_key(group.admitted_version, group.group_id)
        self._queue.put_nowait((key, lambda: encode_group(group, advantages)))

    async def flush(self) -> None:
        """Return when everything handed in so far is stored; raise what went wrong with it."""
        task = self._task
        assert task is not None
        joining = asyncio.ensure_future(self._queue.join())
        await asyncio.wait({task, joining}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        if task.done():
            task.result()

    async def watch(self) -> None:
        """Wait until the writing fails, and raise why."""
        task = self._task
        assert task is not None
        await asyncio.wait({task})
        task.result()

    async def _write(self) -> None:
        while True:
            key, encode = await self._queue.get()
            await self._store.put(key, await asyncio.to_thread(encode))
            self._queue.task_done()
