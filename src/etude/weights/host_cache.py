"""Objects on this machine's disk, so that its replicas download each of them once."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from etude.errors import HostError, IntegrityError
from etude.interfaces import Clock
from etude.store.file_locks import try_lock
from etude.weights.downloads import Objects, Wanted, check

_LOCK_POLL_S = 0.02


class HostCache:
    """Puts a directory that several processes share before another source of objects.

    An object is read from the disk only after its sha256 was checked, so whoever else writes there can do no more than
    cost a download. Of several processes that want an object at once one fetches it, the others wait for it.
    """

    def __init__(
        self, folder: Path, source: Objects, *, clock: Clock, max_bytes: int = 32 << 30, lock_s: float = 300.0
    ) -> None:
        """Keep at most `max_bytes`, those used last; wait at most `lock_s` for another process, then fetch as well.

        Raise `HostError` when the directory cannot be made.
        """
        self.hits = 0
        self._folder = folder
        self._source = source
        self._clock = clock
        self._max_bytes = max_bytes
        self._lock_s = lock_s
        try:
            (folder / "locks").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            msg = f"cannot cache weights in {folder}: {error.strerror}; choose another directory"
            raise HostError(msg) from error
        if not os.access(folder / "locks", os.W_OK | os.X_OK) or not os.access(folder, os.W_OK | os.X_OK):
            msg = f"cannot cache weights in {folder}: this user may not write there; choose another directory"
            raise HostError(msg)

    async def fetch(self, wanted: Wanted) -> bytes:
        """Return the object from the disk, or from the source and then keep it."""
        found = await asyncio.to_thread(self._read, wanted)
        if found is not None:
            return found
        async with self._locked(wanted.name):
            found = await asyncio.to_thread(self._read, wanted)
            if found is not None:
                return found
            data = await self._source.fetch(wanted)
            if wanted.size <= self._max_bytes:
                await asyncio.to_thread(self._write, wanted, data)
            return data

    def _read(self, wanted: Wanted) -> bytes | None:
        """Return what is there and can be read; a file of another user's may be neither."""
        path = self._folder / wanted.name
        try:
            with path.open("rb") as opened:
                data = check(wanted, opened.read(wanted.size + 1))
        except OSError:
            return None
        except IntegrityError:
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(path)
        self.hits += 1
        return data

    def _write(self, wanted: Wanted, data: bytes) -> None:
        """Room is made first. A disk that is full all the same only means that nothing is shared."""
        self._make_room(wanted.size)
        staged = self._folder / f"{wanted.name}.{os.getpid()}"
        try:
            staged.write_bytes(data)
            staged.replace(self._folder / wanted.name)
        except OSError:
            staged.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove what was not used for the longest time, and with it what killed processes left."""
        held: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if path.is_file():
                    facts = path.stat()
                    held.append((facts.st_mtime, facts.st_size, path))
        total = size + sum(num_bytes for _, num_bytes, _ in held)
        for _, num_bytes, path in sorted(held):
            if total <= self._max_bytes:
                return
            with suppress(OSError):
                path.unlink(missing_ok=True)
                total -= num_bytes

    @asynccontextmanager
    async def _locked(self, name: str) -> AsyncGenerator[None]:
        """Hold one of 256 locks, which the kernel frees when its holder dies."""
        path = self._folder / "locks" / name[:2]
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # such as a full disk: then nothing is shared
            yield
            return
        try:
            deadline = self._clock.now() + self._lock_s
            while not try_lock(descriptor, path) and self._clock.now() < deadline:
                await self._clock.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)
