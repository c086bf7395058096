"""A store that takes no more of the network, and of the store, than it is given."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from etude.interfaces import Bucket, Clock


class LimitedStore:
    """Bounds how many calls of a store are under way and how many bytes move per second in each direction.

    An object is moved whole, at the speed of the line; the calls after it then wait until the average is met again. It
    may be used in one event loop after the other.
    """

    def __init__(
        self,
        inner: Bucket,
        *,
        clock: Clock,
        calls: int = 16,
        upload_bytes_s: float = 0.0,
        download_bytes_s: float = 0.0,
    ) -> None:
        """Allow `calls` at once, and these rates; 0 is as fast as the line."""
        self._inner = inner
        self._max_calls = calls
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._uploads = _Line(upload_bytes_s, clock)
        self._downloads = _Line(download_bytes_s, clock)

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read, once there is room."""
        async with self._room(self._downloads):
            data = await self._inner.get(key, max_bytes=max_bytes)
        self._downloads.charge(len(data))
        return data

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Read what changed, once there is room for a call: a look at the head is not held up by bytes."""
        async with self._calls:
            found = await self._inner.get_if_changed(key, tag=tag, max_bytes=max_bytes)
        self._downloads.charge(len(found[0]) if found else 0)
        return found

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part, once there is room."""
        async with self._room(self._downloads, length):
            return await self._inner.get_range(key, start, length)

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write, once there is room."""
        async with self._room(self._uploads, len(data)):
            await self._inner.put(key, data, create_only=create_only)

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Swap, once there is room for a call."""
        async with self._calls:
            return await self._inner.compare_and_swap(key, data, expected=expected)

    async def list(self, prefix: str) -> list[str]:
        """List, once there is room for a call."""
        async with self._calls:
            return await self._inner.list(prefix)

    async def delete(self, key: str) -> None:
        """Remove, once there is room for a call."""
        async with self._calls:
            await self._inner.delete(key)

    @property
    def _calls(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_calls))
        return self._slots[1]

    @asynccontextmanager
    async def _room(self, line: "_Line", num_bytes: int = 0) -> AsyncGenerator[None]:
        await line.free()
        line.charge(num_bytes)
        async with self._calls:
            yield


class _Line:
    """One direction of a network: what moved is paid for by those who come after."""

    def __init__(self, bytes_s: float, clock: Clock) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._free_at = clock.now()

    async def free(self) -> None:
        """Wait until all that was charged has been paid for."""
        while (seconds := self._free_at - self._clock.now()) > 0.0:
            await self._clock.sleep(seconds)

    def charge(self, num_bytes: int) -> None:
        """Let those who come after wait for these bytes."""
        if self._bytes_s:
            self._free_at = max(self._free_at, self._clock.now()) + num_bytes / self._bytes_s
