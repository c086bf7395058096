"""Objects as files under a directory."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import xxhash
from obstore.store import LocalStore

from etude.errors import HostError, ObjectMissingError, StoreError
from etude.store.explaining import explain
from etude.store.file_locks import holder_of, try_lock
from etude.store.keys import check_key
from etude.store.remote import RemoteStore

LOCK_NAME = ".lock"
"""Not a valid key, so it is never listed."""
LOCK_DEADLINE_S = 30.0
_LOCK_POLL_S = 0.005


class FileStore(RemoteStore):
    """An `ObjectStore` in a directory.

    `put` stages a file beside the target and renames it over, so readers see old bytes or new ones and `kill -9` leaves
    at most a staging file. A power failure may lose the last writes.
    """

    def __init__(self, root: Path, *, lock_s: float = LOCK_DEADLINE_S) -> None:
        """Create the directory if need be; raise `StoreError` where that is impossible.

        A swap waits at most `lock_s` seconds for another process.
        """
        self._lock_s = lock_s
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.root = root.resolve(strict=True)
        except OSError as error:
            msg = f"cannot use {root} as a run directory: {explain(error)}"
            raise StoreError(msg) from error
        super().__init__(LocalStore(self.root, mkdir=True), name=str(self.root))

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the file's bytes."""
        self._refuse_links(key)
        return await super().get(key, max_bytes=max_bytes)

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Return the file's bytes and tag, or None when the tag is still `tag`.

        The tag is a hash: clocks of file systems are too coarse to tell two writes apart, and inodes are used again.
        """
        data = await self.get(key, max_bytes=max_bytes)
        found = xxhash.xxh3_128_hexdigest(data)
        return None if found == tag else (data, found)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of the file."""
        self._refuse_links(key)
        return await super().get_range(key, start, length)

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write the whole file."""
        self._refuse_links(key)
        await super().put(key, data, create_only=create_only)

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Replace the file if its bytes are `expected`, under a lock that the kernel frees when its holder dies.

        All writers have to run on machines that share the directory's `flock` (one host, or NFSv4).
        """
        async with self._locked(key):
            try:
                current = await self.get(key)
            except ObjectMissingError:
                current = None
            if current != expected:
                return False
            await self.put(key, data)
        return True

    async def delete(self, key: str) -> None:
        """Remove the file, and its folder when that is empty then."""
        self._refuse_links(key)
        await super().delete(key)
        with contextlib.suppress(OSError):
            (self.root / key).parent.rmdir()

    def _refuse_links(self, key: str) -> None:
        """A link in a shared directory would let its owner read or write files elsewhere."""
        path = self.root
        for part in check_key(key).split("/"):
            path /= part
            if path.is_symlink():
                msg = f"object {key!r} in {self.name}: {path} is a symbolic link; replace it by what it points to"
                raise StoreError(msg)

    @asynccontextmanager
    async def _locked(self, key: str) -> AsyncGenerator[None]:
        deadline = asyncio.get_running_loop().time() + self._lock_s
        path = self.root / LOCK_NAME
        with self._typed("lock", check_key(key)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            while not self._lock(descriptor, path):
                if asyncio.get_running_loop().time() > deadline:
                    msg = (
                        f"object {key!r} in {self.name}: {LOCK_NAME} was held for {self._lock_s:.0f} s by "
                        f"{holder_of(descriptor, path)}"
                    )
                    raise StoreError(msg)
                await asyncio.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, path: Path) -> bool:
        try:
            return try_lock(descriptor, path)
        except HostError as error:
            raise StoreError(str(error)) from error
