"""A store whose calls are repeated when they fail, for stores that do not repeat them themselves."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from etude.errors import ObjectExistsError, ObjectMissingError, ObjectSizeError, StoreError
from etude.interfaces import Bucket, Clock

Result = TypeVar("Result")

_SLOWEST_BYTES_S = 1 << 20

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class RetryingStore:
    """Repeats failed calls of a store, with pauses that double and are drawn at random so that clients spread out.

    A write whose answer was lost may have happened: repeated, it finds its own bytes in place and counts as done.
    Writers that must tell themselves apart put something of their own into the bytes.
    """

    def __init__(
        self, inner: Bucket, *, clock: Clock, attempts: int = 8, deadline_s: float = 60.0, seed: int = 0
    ) -> None:
        """Try each call up to `attempts` times.

        A try without an answer is given up after `deadline_s` real seconds, and one more per MiB that it moves.
        """
        self._inner = inner
        self._clock = clock
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._random = random.Random(seed)

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read; raise at once when the object does not exist."""
        return await self._repeat(lambda _: self._inner.get(key, max_bytes=max_bytes), num_bytes=max_bytes)

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Read what changed; raise at once when the object does not exist."""
        return await self._repeat(
            lambda _: self._inner.get_if_changed(key, tag=tag, max_bytes=max_bytes), num_bytes=max_bytes
        )

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part; raise at once when the object does not exist."""
        return await self._repeat(lambda _: self._inner.get_range(key, start, length), num_bytes=length)

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write; a `create_only` write that finds its own bytes there after a failure has succeeded before."""

        async def write(attempt: int) -> None:
            try:
                await self._inner.put(key, data, create_only=create_only)
            except ObjectExistsError:
                if attempt == 1 or await self._inner.get(key) != data:
                    raise

        await self._repeat(write, num_bytes=len(data))

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Swap; one that finds its own bytes in place after a failure has succeeded before."""

        async def swap(attempt: int) -> bool:
            if await self._inner.compare_and_swap(key, data, expected=expected):
                return True
            return attempt > 1 and await self._is(key, data)

        return await self._repeat(swap)

    async def list(self, prefix: str) -> list[str]:
        """List."""
        return await self._repeat(lambda _: self._inner.list(prefix))

    async def delete(self, key: str) -> None:
        """Remove."""
        await self._repeat(lambda _: self._inner.delete(key))

    async def _is(self, key: str, data: bytes) -> bool:
        try:
            return await self._inner.get(key) == data
        except ObjectMissingError:
            return False

    async def _repeat(self, call: Callable[[int], Awaitable[Result]], *, num_bytes: int | None = 0) -> Result:
        """Return the result of the first try that succeeds; `num_bytes` is what it moves at most, None for anything."""
        seconds = None if num_bytes is None else self._deadline_s + num_bytes / _SLOWEST_BYTES_S
        attempt = 1
        while True:
            try:
                return await _within(seconds, call(attempt))
            except (ObjectMissingError, ObjectExistsError, ObjectSizeError):
                raise
            except StoreError as error:
                if attempt >= self._attempts:
                    error.add_note(f"after {attempt} attempts")
                    raise
            pause = min(_FIRST_PAUSE_S * 2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
            await self._clock.sleep(pause * self._random.uniform(0.5, 1.0))
            attempt += 1


async def _within(seconds: float | None, call: Awaitable[Result]) -> Result:
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        msg = f"no answer within {seconds:.0f} s; check that the store is reachable, and its bandwidth"
        raise StoreError(msg) from error
