"""One publisher at a time: each takes the head over with a greater epoch, and who was taken over from must end."""

import secrets
from collections.abc import Awaitable, Callable

import msgspec
from msgspec.structs import replace

from etude.errors import FencedError, ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.weight_types import Head
from etude.weights.chain import MAX_HEAD_BYTES, WEIGHTS, ChainKeys, parse_head

_ATTEMPTS = 20
"""At a swap that nothing stands in the way of; a store may refuse one without a reason."""


class Claim:
    """The right to move the head, until another publisher takes it."""

    def __init__(self, store: ObjectStore, *, keys: ChainKeys, writer: str, data: bytes | None) -> None:
        """Hold what the head is; `claim` makes it so."""
        self._store = store
        self._keys = keys
        self._writer = writer
        self._data: bytes | None = data
        self._fenced: FencedError | None = None
        self._unsure = False
        """Whether a swap was asked for whose answer did not come."""
        self.head: Head | None = parse_head(data, keys=keys) if data is not None else None
        """As it was last read or written."""
        self.epoch = self.head.epoch if self.head else 1

    async def settle(self) -> bool:
        """Find out whether the last swap took effect if its answer was lost; return whether that was unclear.

        What the head names must not be written again: a store that fails in between would leave half of it.

        Raises:
            FencedError: Another publisher took over.
            StoreError: The store failed.
        """
        if self._fenced is not None:
            raise self._fenced
        if not self._unsure:
            return False
        self._look_at(await _read(self._store, self._keys))
        return True

    async def move(self, make: Callable[[Head | None], Awaitable[Head]]) -> Head:
        """Replace the head by what `make` returns for the one that is there, and return that.

        `make` is asked again when somebody raised the floor meanwhile. Epoch and writer are put in here.

        Raises:
            FencedError: Another publisher took over, now or before.
            StoreError: The store failed, maybe after it moved the head: calling this again finds out.
        """
        await self.settle()
        for _ in range(_ATTEMPTS):
            wanted = replace(await make(self.head), epoch=self.epoch, writer=self._writer)
            data = msgspec.json.encode(wanted)
            if data == self._data:
                return wanted
            self._unsure = True
            if await self._store.compare_and_swap(self._keys.head, data, expected=self._data):
                self.head, self._data, self._unsure = wanted, data, False
                return wanted
            # A store may refuse a swap that it carried out, or one that nothing stood in the way of.
            self._look_at(await _read(self._store, self._keys))
        msg = f"{self._keys.head}: the store refused {_ATTEMPTS} swaps without a reason; resume when it works again"
        raise StoreError(msg)

    def _look_at(self, data: bytes | None) -> None:
        self._unsure = False
        if data == self._data:
            return
        head = parse_head(data, keys=self._keys) if data is not None else None
        if head is None or (head.epoch, head.writer) != (self.epoch, self._writer):
            where = f"epoch {head.epoch}, at version {head.version} of lineage {head.lineage}" if head else "nobody"
            self._fenced = FencedError(
                f"{self._keys.head} belongs to another publisher ({where}) and no longer to this one (epoch "
                f"{self.epoch}): another trainer was started for this run; this one ends, let the other one go on"
            )
            raise self._fenced
        self.head, self._data = head, data


async def claim(store: ObjectStore, *, keys: ChainKeys = WEIGHTS) -> Claim:
    """Take the head over from whoever published last: from now on their swaps fail.

    Without a head there is nothing to take over; of several publishers the first to publish wins.

    Raises:
        StoreError: The store failed.
    """
    writer = secrets.token_hex(8)
    for _ in range(_ATTEMPTS):
        data = await _read(store, keys)
        if data is None:
            return Claim(store, keys=keys, writer=writer, data=None)
        head = parse_head(data, keys=keys)
        mine = msgspec.json.encode(replace(head, epoch=head.epoch + 1, writer=writer))
        if await store.compare_and_swap(keys.head, mine, expected=data) or await _read(store, keys) == mine:
            return Claim(store, keys=keys, writer=writer, data=mine)
    msg = f"{keys.head}: other publishers took it over {_ATTEMPTS} times meanwhile; run one trainer at a time"
    raise StoreError(msg)


async def _read(store: ObjectStore, keys: ChainKeys) -> bytes | None:
    try:
        return await store.get(keys.head, max_bytes=MAX_HEAD_BYTES)
    except ObjectMissingError:
        return None
