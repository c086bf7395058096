"""A store whose calls are repeated when they fail, for stores that do not repeat them themselves."""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from etude.errors import ObjectExistsError, ObjectMissingError, ObjectSizeError, StoreError
from etude.interfaces import Bucket, Clock

Result = TypeVar("Result")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class RetryingStore:
    """Repeats failed calls of a store, with pauses that double and are drawn at random so that clients spread out.

    A write whose answer was lost may have happened: repeated, it finds its own bytes in place and counts as done.
    Writers that must tell themselves apart put something of their own into the bytes.
    """

    def __init__(self, inner: Bucket, *, clock: Clock, attempts: int = 8, seed: int = 0) -> None:
        """Try each call up to `attempts` times."""
        self._inner = inner
        self._clock = clock
        self._attempts = attempts
        self._random = random.Random(seed)

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read; raise at once when the object does not exist."""
        return await self._repeat(lambda _: self._inner.get(key, max_bytes=max_bytes))

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Read what changed; raise at once when the object does not exist."""
        return await self._repeat(lambda _: self._inner.get_if_changed(key, tag=tag, max_bytes=max_bytes))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part; raise at once when the object does not exist."""
        return await self._repeat(lambda _: self._inner.get_range(key, start, length))

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write; a `create_only` write that finds its own bytes there after a failure has succeeded before."""

        async def write(attempt: int) -> None:
            try:
                await self._inner.put(key, data, create_only=create_only)
            except ObjectExistsError:
                if attempt == 1 or await self._inner.get(key) != data:
                    raise

        await self._repeat(write)

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

    async def _repeat(self, call: Callable[[int], Awaitable[Result]]) -> Result:
        attempt = 1
        while True:
            try:
                return await call(attempt)
            except (ObjectMissingError, ObjectExistsError, ObjectSizeError):
                raise
            except StoreError as error:
                if attempt >= self._attempts:
                    error.add_note(f"after {attempt} attempts")
                    raise
            pause = min(_FIRST_PAUSE_S * 2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
            await self._clock.sleep(pause * self._random.uniform(0.5, 1.0))
            attempt += 1
