"""The head as one reader sees it: asked for only when it changed, and never going back."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from etude.errors import IntegrityError, ObjectMissingError
from etude.interfaces import ObjectStore
from etude.weight_types import Head
from etude.weights.chain import MAX_HEAD_BYTES, WEIGHTS, ChainKeys, parse_head

_IfChanged = Callable[..., Awaitable[tuple[bytes, str] | None]]


class Seen(NamedTuple):
    """A head, and the store's tag of its bytes."""

    head: Head
    tag: str


class HeadWatch:
    """Looks at a head time and again."""

    def __init__(self, store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> None:
        """Use the store's conditional reads where it has them."""
        self._store = store
        self._keys = keys
        self._settled: Seen | None = None
        self._if_changed = cast("_IfChanged", getattr(store, "get_if_changed", self._read_whole))

    async def look(self) -> Seen | None:
        """Return the head unless it is the one that `settle` was last called with; None while nothing was published.

        Raises:
            IntegrityError: It is damaged, or went back: to an older version of its lineage, to other bytes of the same
                version, or to a publisher that was replaced.
            StoreError: It cannot be read.
        """
        tag = self._settled.tag if self._settled else None
        try:
            found = await self._if_changed(self._keys.head, tag=tag, max_bytes=MAX_HEAD_BYTES)
        except ObjectMissingError:
            found = None
        if found is None:
            return None
        data, tag = found
        head = parse_head(data, keys=self._keys)
        if self._settled is not None:
            self._check(self._settled.head, head)
        return Seen(head, tag)

    def settle(self, seen: Seen) -> None:
        """Be told of the head only when it is another one than this."""
        self._settled = seen

    def _check(self, before: Head, head: Head) -> None:
        check_forward(head, lineage=before.lineage, version=before.version, digest=before.digest, keys=self._keys)
        if head.epoch < before.epoch:
            msg = (
                f"{self._keys.head} went from epoch {before.epoch} to {head.epoch}: a publisher that was replaced goes "
                f"on; end it"
            )
            raise IntegrityError(msg)

    async def _read_whole(self, key: str, *, tag: str | None, max_bytes: int | None = None) -> tuple[bytes, str] | None:
        data = await self._store.get(key, max_bytes=max_bytes)
        found = hashlib.sha256(data).hexdigest()
        return None if found == tag else (data, found)


def check_forward(head: Head, *, lineage: str, version: int, digest: str, keys: ChainKeys) -> None:
    """Raise `IntegrityError` when a head is behind a version that was seen, or names it with other bytes."""
    changed = head.version == version and head.digest != digest
    if head.lineage == lineage and (head.version < version or changed):
        how = "other bytes of it" if changed else str(head.version)
        msg = (
            f"{keys.head} went from version {version} to {how} within lineage {lineage}; weights only grow: resume the "
            f"trainer, which starts a new lineage, or follow into an empty directory"
        )
        raise IntegrityError(msg)
