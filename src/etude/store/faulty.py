"""A store that fails on purpose: the double for everything that talks to one."""

import asyncio
import random

import msgspec

from etude.errors import StoreError
from etude.interfaces import Bucket, Clock


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How often things go wrong; shares of calls between 0 and 1."""

    fail: float = 0.0
    """Nothing happens and the caller is told so."""
    lost_reply: float = 0.0
    """A write happens, but the caller is told that it failed."""
    torn_write: float = 0.0
    """Only the first part of a put is written, and the caller is told that it failed."""
    torn_read: float = 0.0
    """A get returns only the first part."""
    lost_swap: float = 0.0
    """A conditional put is refused although its condition holds."""
    mute: float = 0.0
    """The call never ends."""
    max_delay_s: float = 0.0
    """Every call waits a random time up to this before it happens and again before its answer, on the clock: calls made
    together happen in any order and end in any other."""
    list_lag: int = 0
    """The newest keys that `list` does not show yet."""
    list_delay_s: float = 0.0
    """Seconds on the clock after which `list` shows a key that was written for the first time."""


class FaultyStore:
    """Wraps a store and injects faults drawn from a seed, the same ones for the same sequence of calls."""

    def __init__(self, inner: Bucket, *, clock: Clock, faults: Faults, seed: int = 0) -> None:
        self.faults = faults
        """May be replaced at any time: `Faults()` heals the store."""
        self._inner = inner
        self._clock = clock
        self._random = random.Random(seed)
        self._created: dict[str, float] = {}
        """Keys in the order in which they were first written, with the time."""

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read, perhaps only a part."""
        await self._enter("get", key)
        data = await self._inner.get(key, max_bytes=max_bytes)
        await self._wait()
        return self._part(data) if self._happens(self.faults.torn_read) else data

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Read what changed, perhaps only a part of it."""
        await self._enter("get", key)
        found = await self._inner.get_if_changed(key, tag=tag, max_bytes=max_bytes)
        await self._wait()
        if found is None or not self._happens(self.faults.torn_read):
            return found
        data, new_tag = found
        return self._part(data), new_tag

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part, perhaps less of it than was asked for."""
        await self._enter("get", key)
        data = await self._inner.get_range(key, start, length)
        await self._wait()
        return self._part(data) if self._happens(self.faults.torn_read) else data

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write, perhaps only a part, perhaps without a reply."""
        await self._enter("put", key)
        torn = self._happens(self.faults.torn_write)
        await self._inner.put(key, self._part(data) if torn else data, create_only=create_only)
        self._created.setdefault(key, self._clock.now())
        await self._wait()
        if torn:
            raise _injected("torn write", key)
        if self._happens(self.faults.lost_reply):
            raise _injected("lost reply to put", key)

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Swap, perhaps refused without a reason, perhaps without a reply."""
        await self._enter("swap", key)
        if self._happens(self.faults.lost_swap):
            return False
        swapped = await self._inner.compare_and_swap(key, data, expected=expected)
        if swapped:
            self._created.setdefault(key, self._clock.now())
        await self._wait()
        if self._happens(self.faults.lost_reply):
            raise _injected("lost reply to swap", key)
        return swapped

    async def list(self, prefix: str) -> list[str]:
        """List what was written, except the newest."""
        await self._enter("list", prefix)
        keys = await self._inner.list(prefix)
        hidden = self._hidden()
        await self._wait()
        return [key for key in keys if key not in hidden]

    async def delete(self, key: str) -> None:
        """Remove, perhaps without a reply."""
        await self._enter("delete", key)
        await self._inner.delete(key)
        self._created.pop(key, None)
        await self._wait()
        if self._happens(self.faults.lost_reply):
            raise _injected("lost reply to delete", key)

    async def _enter(self, action: str, key: str) -> None:
        await self._wait()
        if self._happens(self.faults.mute):
            await asyncio.get_running_loop().create_future()
        if self._happens(self.faults.fail):
            raise _injected(action, key)

    async def _wait(self) -> None:
        if self.faults.max_delay_s:
            await self._clock.sleep(self._random.uniform(0.0, self.faults.max_delay_s))

    def _hidden(self) -> set[str]:
        """Return the keys that no listing shows yet."""
        keys = list(self._created)
        newest = keys[-self.faults.list_lag :] if self.faults.list_lag else []
        shown = self._clock.now() - self.faults.list_delay_s
        return {*newest, *(key for key, written in self._created.items() if written > shown)}

    def _happens(self, share: float) -> bool:
        return self._random.random() < share

    def _part(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))] if data else data


def _injected(what: str, key: str) -> StoreError:
    return StoreError(f"injected fault: {what} of {key!r}; nothing to do, this is a test")
