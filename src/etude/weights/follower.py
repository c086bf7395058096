"""New policy versions for a reader: found, verified and built before anything of the reader's is touched."""

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from torch import Tensor

from etude.errors import IntegrityError, StoreError
from etude.interfaces import Clock, ObjectStore
from etude.weight_types import Head
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.downloads import Objects, StoreObjects
from etude.weights.heads import HeadWatch, check_forward
from etude.weights.leases import LeaseKeeper
from etude.weights.memory import HOST, Memory
from etude.weights.paths import MAX_VERSION_BYTES, Held, Path, find_path
from etude.weights.planner import bytes_of
from etude.weights.reader import Loaded, build

_MAX_BACKOFF_S = 10.0
_JITTER = 0.2
"""Share of the period by which looks at the head are spread, so that many readers do not come at once."""


Arrive = Callable[[Path, Objects], Awaitable[None]]
"""Builds the version that a path leads to out of the objects along it."""


class StagedVersion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Verified weights, ready to be swapped in. The tensors lie in their follower's memory; nobody writes to them."""

    lineage: str
    version: int
    digest: str
    """Of the version as the trainer published it, also where this is a view of it."""
    step: int
    tensors: dict[str, Tensor]


class PathFollower:
    """Finds out where the head is, and the cheapest way there, again and again."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock,
        keys: ChainKeys = WEIGHTS,
        poll_s: float = 0.2,
        attempts: int = 5,
        max_bytes: int = MAX_VERSION_BYTES,
        objects: Objects | None = None,
        lease: LeaseKeeper | None = None,
        seed: int | None = None,
    ) -> None:
        """Look at the head about every `poll_s` seconds; give a version `attempts` tries with growing pauses between.

        Objects come from `objects`, or straight from the store. With a `lease`, nothing that a path needs is deleted
        while the reader is on it.
        """
        self.waiting_for = f"the first {keys.head}"
        """What the follower waits for, for people."""
        self.num_versions = 0
        """That were reached."""
        self.planned_bytes = 0
        """Of the paths to them."""
        self.keys = keys
        self._store = store
        self._clock = clock
        self._poll_s = poll_s
        self._attempts = attempts
        self._max_bytes = max_bytes
        self._objects = objects or StoreObjects(store)
        self._lease = lease
        self._random = random.Random(seed)
        self._watch = HeadWatch(store, keys=keys)

    async def pause(self) -> None:
        """Wait until the next look."""
        await self._clock.sleep(self._poll_s * self._random.uniform(1 - _JITTER, 1 + _JITTER))

    async def poll(self, held: Callable[[], Held | None], arrive: Arrive) -> bool:
        """Go to the head's version and return True, or False when it is the one `held` or nothing is published.

        A try that finds damaged bytes is followed by tries that start from nothing.

        Raises:
            IntegrityError: The chain stays damaged, or the head went back.
            StoreError: The store stays out of reach.
        """
        anew = False
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._go(held(), None if anew else held(), arrive)
            except StoreError as error:
                if attempt == self._attempts:
                    error.add_note(f"after {attempt} attempts; this reader keeps the weights it has")
                    raise
                anew = anew or isinstance(error, IntegrityError)
                self.waiting_for = f"attempt {attempt + 1} of {self._attempts} after: {error}"
                pause = min(self._poll_s * 2.0**attempt, _MAX_BACKOFF_S)
                await self._clock.sleep(pause * self._random.uniform(1 - _JITTER, 1))
        return False

    async def close(self) -> None:
        """Give the lease back."""
        if self._lease is not None:
            await self._lease.release()

    async def _go(self, held: Held | None, start: Held | None, arrive: Arrive) -> bool:
        seen = await self._watch.look()
        if seen is not None and held is not None:
            check_forward(seen.head, lineage=held.lineage, version=held.version, digest=held.digest, keys=self.keys)
        if seen is None or held == Held(lineage=seen.head.lineage, version=seen.head.version, digest=seen.head.digest):
            self.waiting_for = f"a version after {held.version}" if held else f"the first {self.keys.head}"
            if seen is not None:
                self._watch.settle(seen)
            if held is not None and self._lease is not None:
                await self._lease.hold(held.lineage, held.version, wanted=held.version)
            return False
        self.waiting_for = f"the objects of version {seen.head.version}"
        path = await self._path(seen.head, start)
        await arrive(path, self._leased(path))
        self._watch.settle(seen)
        self.num_versions += 1
        self.planned_bytes += bytes_of(path.routes)
        return True

    def _leased(self, path: Path) -> Objects:
        if self._lease is None or not path.manifests:
            return self._objects
        return self._lease.renewing(self._objects, path.lineage, path.oldest, wanted=path.manifests[-1].version)

    async def _path(self, head: Head, start: Held | None) -> Path:
        """Return a path whose objects stay until the reader has arrived."""
        path = await find_path(self._store, head, held=start, max_bytes=self._max_bytes, keys=self.keys)
        lease = self._lease
        if lease is None or lease.covers(path.lineage, path.oldest):
            return path
        await lease.hold(path.lineage, path.oldest, wanted=head.version)
        # Either the floor rose before the lease was written, and this look shows it, or whoever raises it will see the
        # lease before deleting anything.
        now = await self._watch.look()
        if now is not None and (now.head.lineage != head.lineage or now.head.floor > path.oldest):
            msg = f"the floor of {self.keys.root} has passed version {path.oldest}; starting again from the head"
            raise StoreError(msg)
        return path


class Follower:
    """Follows a chain in the memory of this process or of a device, skipping to the newest version when it lags."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock,
        keys: ChainKeys = WEIGHTS,
        poll_s: float = 0.2,
        attempts: int = 5,
        max_bytes: int = MAX_VERSION_BYTES,
        objects: Objects | None = None,
        lease: LeaseKeeper | None = None,
        seed: int | None = None,
        memory: Memory[Any] = HOST,
    ) -> None:
        """As `PathFollower`; the weights held, and the copy that the next version is built in, lie in `memory`."""
        self.paths = PathFollower(
            store,
            clock=clock,
            keys=keys,
            poll_s=poll_s,
            attempts=attempts,
            max_bytes=max_bytes,
            objects=objects,
            lease=lease,
            seed=seed,
        )
        self._memory = memory
        self._loaded: Loaded[Any] | None = None

    @property
    def waiting_for(self) -> str:
        """What the follower waits for, for people."""
        return self.paths.waiting_for

    async def staged(self) -> AsyncGenerator[StagedVersion]:
        """Yield each version once its weights are verified, forever; versions published meanwhile are skipped.

        Errors as in `poll`. Iterating again goes on after the last version that was yielded.
        """
        while True:
            staged = await self.poll()
            if staged is not None:
                yield staged
            await self.paths.pause()

    async def poll(self) -> StagedVersion | None:
        """Return the head's version, or None when it is the last one returned or nothing is published.

        Errors as in `PathFollower.poll`.
        """
        if not await self.paths.poll(self._held, self._arrive):
            return None
        loaded = self._loaded
        assert loaded is not None
        return StagedVersion(
            lineage=loaded.lineage,
            version=loaded.version,
            digest=loaded.source or loaded.digest,
            step=loaded.step,
            tensors={name: self._memory.tensor(flat) for name, flat in loaded.tensors.items()},
        )

    async def close(self) -> None:
        """Give the lease back."""
        await self.paths.close()

    def _held(self) -> Held | None:
        return self._loaded.held if self._loaded else None

    async def _arrive(self, path: Path, objects: Objects) -> None:
        self._loaded = await build(path, objects, base=self._loaded, memory=self._memory, keys=self.paths.keys)
