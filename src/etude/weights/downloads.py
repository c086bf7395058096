"""Objects of the chain on their way to a reader: checked against their names, ahead of need, in bounded memory."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from etude.errors import IntegrityError
from etude.interfaces import ObjectStore
from etude.weights.digest import object_name

IN_FLIGHT_BYTES = 256 << 20
_FETCHES = 3
"""Of an object that comes damaged, before it is taken for damaged where it lies."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """An object that a reader needs."""

    key: str
    name: str
    """The sha256 of its bytes."""
    size: int


@runtime_checkable
class Objects(Protocol):
    """Where a reader gets objects from."""

    async def fetch(self, wanted: Wanted) -> bytes:
        """Return the object, verified. Raise `IntegrityError` for other bytes, `StoreError` when there is none."""
        ...


class StoreObjects:
    """Objects straight out of the store."""

    def __init__(self, store: ObjectStore) -> None:
        self.num_bytes = 0
        """Read so far, damaged ones included."""
        self._store = store

    async def fetch(self, wanted: Wanted) -> bytes:
        """Return the object."""
        for _ in range(_FETCHES - 1):
            try:
                return await self._fetch(wanted)
            except IntegrityError:
                continue
        return await self._fetch(wanted)

    async def _fetch(self, wanted: Wanted) -> bytes:
        data = await self._store.get(wanted.key, max_bytes=wanted.size)
        self.num_bytes += len(data)
        return await asyncio.to_thread(check, wanted, data)


def check(wanted: Wanted, data: bytes) -> bytes:
    """Return the bytes, or raise `IntegrityError` when they are not those that the object is named by."""
    if len(data) != wanted.size or object_name(data) != wanted.name:
        msg = f"object {wanted.key} is damaged ({len(data)} bytes of {wanted.size}); fetch it again"
        raise IntegrityError(msg)
    return data


async def in_order(
    objects: Objects, wanted: Sequence[Wanted], *, in_flight_bytes: int = IN_FLIGHT_BYTES
) -> AsyncGenerator[bytes]:
    """Yield the objects one after the other while later ones are on their way. Close it (`aclosing`) to stop them.

    Those on their way and the one that is used together have at most `in_flight_bytes`, or are a single larger one.
    """
    ahead: deque[tuple[int, asyncio.Task[bytes]]] = deque()
    held = position = 0
    try:
        while ahead or position < len(wanted):
            while position < len(wanted) and (not ahead or held + wanted[position].size <= in_flight_bytes):
                task = asyncio.create_task(objects.fetch(wanted[position]), name=f"fetch {wanted[position].name[:16]}")
                ahead.append((wanted[position].size, task))
                held += wanted[position].size
                position += 1
            size, task = ahead[0]
            data = await task
            yield data
            del data
            held -= size
            ahead.popleft()
    finally:
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
