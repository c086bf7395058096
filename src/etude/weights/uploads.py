"""Pieces into objects, and objects into the store: beside the encoding of the next ones, in bounded memory."""

import asyncio

from etude.errors import StoreError
from etude.interfaces import Bucket
from etude.weight_types import Piece
from etude.weights.chain import ChainKeys
from etude.weights.digest import object_name
from etude.weights.packing import Encoded

OBJECT_BYTES = 8 << 20
"""An object is closed once it has so many; its last piece may make it larger by a group."""


class Stored:
    """The objects of a lineage that are known to be in the store, so that none is uploaded twice."""

    def __init__(self, store: Bucket, *, lineage: str, keys: ChainKeys) -> None:
        """Know of nothing yet."""
        self._store = store
        self._lineage = lineage
        self._keys = keys
        self._names: set[str] = set()
        self.asks = False
        """Whether objects may be there that this process does not know of, because a predecessor was cut off."""

    async def put(self, name: str, data: bytes) -> None:
        """Store an object unless it is there; its name is the sha256 of its bytes."""
        if name in self._names:
            return
        key = self._keys.object(self._lineage, name)
        if not (self.asks and await self._ends_alike(key, data)):
            # Not create-only: a store may hold half of an earlier attempt, and this name admits only these bytes.
            await self._store.put(key, data)
        self._names.add(name)

    def forget(self) -> None:
        """Forget the names; objects of one version are seldom those of the next."""
        self._names.clear()

    async def _ends_alike(self, key: str, data: bytes) -> bool:
        """Whether an object of this name is there as a whole: one that was cut off lacks the last byte."""
        try:
            return await self._store.get_range(key, len(data) - 1, 1) == data[-1:]
        except StoreError:
            # Not there, too short, or out of reach: putting it shows which.
            return False


class Uploads:
    """Puts the objects of one manifest, a few at a time."""

    def __init__(self, stored: Stored, *, limit: int) -> None:
        """Have at most `limit` objects under way."""
        self._stored = stored
        self._slots = asyncio.Semaphore(limit)
        self._under_way: set[asyncio.Task[None]] = set()
        self._open: list[Encoded] = []
        self.pieces: list[Piece] = []
        self.num_bytes = 0

    async def add(self, encoded: Encoded) -> None:
        """Take a piece; wait while as many objects as allowed are under way. Raise what went wrong with one of them."""
        self._open.append(encoded)
        if sum(len(one.data) for one in self._open) >= OBJECT_BYTES:
            await self._close()

    async def finish(self) -> None:
        """Return once everything is stored."""
        if self._open:
            await self._close()
        await asyncio.gather(*self._under_way)

    async def abandon(self) -> None:
        """Give up what is under way, if anything is."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _close(self) -> None:
        await self._slots.acquire()
        for task in [task for task in self._under_way if task.done()]:
            self._under_way.remove(task)
            task.result()
        encoded, self._open = self._open, []
        data = b"".join(one.data for one in encoded)
        name = await asyncio.to_thread(object_name, data)
        offset = 0
        for one in encoded:
            length = len(one.data)
            self.pieces.append(Piece(object=name, offset=offset, length=length, encoding=one.encoding, boxes=one.boxes))
            offset += length
        self.num_bytes += offset
        self._under_way.add(asyncio.create_task(self._put(name, data)))

    async def _put(self, name: str, data: bytes) -> None:
        try:
            await self._stored.put(name, data)
        finally:
            self._slots.release()
