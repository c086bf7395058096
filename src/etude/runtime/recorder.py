"""Writes what a run leaves for people and for resuming, beside the event loop that makes it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from etude.algorithm.trees import edge_counts
from etude.errors import StoreError
from etude.interfaces import Ledger, ObjectStore
from etude.rollout.record import RolloutRecord, encode_record
from etude.store.groups import encode_group, group_key
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import Event, GroupReady, RolloutEnded
from etude.telemetry.waits import waiting
from etude.types import Group, Trajectory

_MAX_WAITING = 1 << 14
_STORED_WITHIN_S = 900.0
"""Longer than a store that answers at all takes for what may wait here."""
_MAX_TOGETHER = 32
"""Files that share one flush of the ledger."""


@dataclass(slots=True)
class _File:
    key: str
    encode: Callable[[], bytes]
    fact: Callable[[str], Event]
    """What the ledger says of the file, given its digest."""
    stored: asyncio.Future[None] | None = None


class Recorder:
    """Puts rollouts and groups into the run directory, in the order they came, in one owned task.

    The ledger has the digest of each file before the file is there. Use as an async context manager: leaving it writes
    what is waiting. What went wrong is raised by `watch`, `flush`, `keep_group` and on leaving.
    """

    name = "recorder"

    def __init__(self, store: ObjectStore, ledger: Ledger = NO_LEDGER) -> None:
        self.ledger = ledger
        self._store = store
        self._queue: asyncio.Queue[_File] = asyncio.Queue(_MAX_WAITING)
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
        fact = _ended(record.trajectory)
        self._queue.put_nowait(_File(record.key, lambda: encode_record(record), fact))

    def group(self, group: Group, advantages: Sequence[float | None]) -> None:
        """Keep a finished group, under the policy version it was admitted at."""
        self._queue.put_nowait(_group_file(group, advantages))

    async def keep_group(self, group: Group, advantages: Sequence[float | None]) -> None:
        """Keep a finished group, and return when it may be trained: once ledger and run directory have it."""
        file = _group_file(group, advantages)
        file.stored = asyncio.get_running_loop().create_future()
        async with waiting(
            "a group's file", owner="rollouts", on="recorder", deadline_s=_STORED_WITHIN_S, error=StoreError
        ):
            await self._queue.put(file)
            await self._done(file.stored)

    async def flush(self) -> None:
        """Return when everything handed in so far is stored; raise what went wrong with it."""
        joining = asyncio.ensure_future(self._queue.join())
        try:
            async with waiting(
                "all files", owner="checkpoint", on="recorder", deadline_s=_STORED_WITHIN_S, error=StoreError
            ):
                await self._done(joining)
        finally:
            joining.cancel()

    async def watch(self) -> None:
        """Wait until the writing fails, and raise why."""
        task = self._task
        assert task is not None
        await asyncio.wait({task})
        task.result()

    async def _done(self, future: asyncio.Future[None]) -> None:
        """Wait for a part of the work, and raise why the writing failed when it did."""
        task = self._task
        assert task is not None
        await asyncio.wait({task, future}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            task.result()
            msg = "the recorder has stopped; a group that was handed in is not stored"
            raise StoreError(msg)

    async def _write(self) -> None:
        while True:
            files = [await self._queue.get()]
            while len(files) < _MAX_TOGETHER and not self._queue.empty():
                files.append(self._queue.get_nowait())
            encoded = [await asyncio.to_thread(_encoded, file) for file in files]
            for file, (_, digest) in zip(files, encoded, strict=True):
                self.ledger.record(file.fact(digest))
            await self.ledger.flush()
            for file, (data, _) in zip(files, encoded, strict=True):
                await self._store.put(file.key, data)
                if file.stored is not None and not file.stored.done():
                    file.stored.set_result(None)
                self._queue.task_done()


def _encoded(file: _File) -> tuple[bytes, str]:
    data = file.encode()
    return data, sha256(data).hexdigest()


def _group_file(group: Group, advantages: Sequence[float | None]) -> _File:
    key = group_key(group.admitted_version, group.group_id)

    def fact(digest: str) -> Event:
        return GroupReady(
            ticket=group.ticket,
            key=key,
            digest=digest,
            rollouts=tuple(trajectory.session_id for trajectory in group.trajectories),
            drawn=sum(map(_drawn, group.trajectories)),
        )

    return _File(key, lambda: encode_group(group, advantages), fact)


def _ended(trajectory: Trajectory) -> Callable[[str], Event]:
    failure = trajectory.failure

    def fact(digest: str) -> Event:
        return RolloutEnded(
            rollout=trajectory.rollout_id,
            session=trajectory.session_id,
            outcome=trajectory.outcome.value,
            reward=trajectory.reward,
            reason="" if failure is None else f"{failure.component}/{failure.reason}",
            calls=len(trajectory.nodes),
            edges=edge_counts(trajectory.nodes),
            drawn=_drawn(trajectory),
            seconds=round(trajectory.seconds, 3),
            digest=digest,
        )

    return fact


def _drawn(trajectory: Trajectory) -> int:
    return sum(len(node.completion.token_ids) for node in trajectory.nodes)
