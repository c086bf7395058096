"""Pieces into objects, and objects into the store: beside the encoding of the next ones, in bounded memory."""

import asyncio

from etude.interfaces import ObjectStore
from etude.types import Piece
from etude.weights.chain import ChainKeys
from etude.weights.digest import object_name
from etude.weights.packing import Encoded

OBJECT_BYTES = 8 << 20
"""An object is closed once it has so many; the last piece may make it a group larger."""


class Uploads:
    """Puts the objects of one version, a few at a time."""

    def __init__(self, store: ObjectStore, *, keys: ChainKeys, lineage: str, stored: set[str], limit: int) -> None:
        """`stored` has the names of objects that are known to be there; those that are put are added."""
        self._store = store
        self._keys = keys
        self._lineage = lineage
        self._stored = stored
        self._slots = asyncio.Semaphore(limit)
        self._under_way: set[asyncio.Task[None]] = set()
        self._size = 0
        self._open: list[Encoded] = []
        self.pieces: list[Piece] = []
        self.num_bytes = 0

    async def add(self, encoded: Encoded) -> None:
        """Take a piece; wait while as many objects as are allowed are under way. Raise what went wrong with one."""
        self._open.append(encoded)
        self._size += len(encoded.data)
        if self._size >= OBJECT_BYTES:
            await self._close()

    async def finish(self) -> None:
        """Return once everything is stored."""
        if self._open:
            await self._close()
        await asyncio.gather(*self._under_way)

    def cancel(self) -> None:
        """Give up what is under way."""
        for task in self._under_way:
            task.cancel()

    async def _close(self) -> None:
        encoded, size = self._open, self._size
        self._open, self._size = [], 0
        await self._slots.acquire()
        for task in [task for task in self._under_way if task.done()]:
            self._under_way.remove(task)
            task.result()
        data = b"".join(one.data for one in encoded)
        name = await asyncio.to_thread(object_name, data)
        offset = 0
        for one in encoded:
            length = len(one.data)
            self.pieces.append(Piece(object=name, offset=offset, length=length, encoding=one.encoding, boxes=one.boxes))
            offset += length
        self.num_bytes += size
        self._under_way.add(asyncio.create_task(self._put(name, data)))

    async def _put(self, name: str, data: bytes) -> None:
        try:
            if name not in self._stored:
                # Not create-only: a store may hold half of an earlier attempt, and this name admits only these bytes.
                await self._store.put(self._keys.object(self._lineage, name), data)
                self._stored.add(name)
        finally:
            self._slots.release()
