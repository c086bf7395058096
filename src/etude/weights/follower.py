"""New policy versions for a sampler: found, verified and staged before anything is touched."""

from collections.abc import AsyncGenerator

import msgspec
from torch import Tensor

from etude.errors import IntegrityError, StoreError
from etude.interfaces import Clock, ObjectStore
from etude.types import Head
from etude.weights.chain import HEAD_KEY
from etude.weights.reader import MAX_VERSION_BYTES, LoadedVersion, load_head, read_head
from etude.weights.tensors import unflatten

_MAX_BACKOFF_S = 10.0


class StagedVersion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Verified weights, ready to be swapped in. The tensors lie on the CPU and are read-only by agreement."""

    lineage: str
    version: int
    digest: str
    step: int
    tensors: dict[str, Tensor]


class Follower:
    """Follows the head of a run's weights, skipping to the newest version when it lags."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock,
        poll_s: float = 0.2,
        attempts: int = 5,
        max_bytes: int = MAX_VERSION_BYTES,
    ) -> None:
        """Look at the head every `poll_s` seconds; give a version `attempts` tries with growing pauses between."""
        self.waiting_for = f"the first {HEAD_KEY}"
        """What the follower waits for, for people."""
        self._store = store
        self._clock = clock
        self._poll_s = poll_s
        self._attempts = attempts
        self._max_bytes = max_bytes
        self._held: LoadedVersion | None = None

    async def staged(self) -> AsyncGenerator[StagedVersion]:
        """Yield each version once its weights are verified, forever; versions published meanwhile are skipped.

        Errors as in `poll`. Iterating again goes on after the last version that was yielded.
        """
        while True:
            staged = await self.poll()
            if staged is not None:
                yield staged
            await self._clock.sleep(self._poll_s)

    async def poll(self) -> StagedVersion | None:
        """Return the head's version, or None when it is the last one returned or nothing is published.

        A try that finds damaged bytes is followed by tries that start from the anchor.

        Raises:
            IntegrityError: The chain stays damaged, or the head went back within its lineage.
            StoreError: The store stays out of reach.
        """
        base = self._held
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._look(base)
            except StoreError as error:
                if attempt == self._attempts:
                    error.add_note(f"after {attempt} attempts; this sampler keeps the weights it has")
                    raise
                if isinstance(error, IntegrityError):
                    base = None
                self.waiting_for = f"attempt {attempt + 1} of {self._attempts} after: {error}"
                await self._clock.sleep(min(self._poll_s * 2.0**attempt, _MAX_BACKOFF_S))
        return None

    async def _look(self, base: LoadedVersion | None) -> StagedVersion | None:
        head = await read_head(self._store)
        if head is None or self._is_held(head):
            self.waiting_for = f"a version after {self._held.version}" if self._held else f"the first {HEAD_KEY}"
            return None
        self.waiting_for = f"the objects of version {head.version}"
        held = base if base and base.lineage == head.lineage else None
        loaded = await load_head(self._store, head, held=held, max_bytes=self._max_bytes)
        self._held = loaded
        return StagedVersion(
            lineage=loaded.lineage,
            version=loaded.version,
            digest=loaded.digest,
            step=loaded.step,
            tensors={name: unflatten(flat) for name, flat in loaded.tensors.items()},
        )

    def _is_held(self, head: Head) -> bool:
        held = self._held
        if held is None or held.lineage != head.lineage or held.version < head.version:
            return False
        if (held.version, held.digest) == (head.version, head.digest):
            return True
        msg = (
            f"{HEAD_KEY} went from version {held.version} to {head.version} within lineage {head.lineage}; "
            f"weights only grow: resume the trainer, which starts a new lineage"
        )
        raise IntegrityError(msg)
