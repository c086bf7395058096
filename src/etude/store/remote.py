"""Objects behind `obstore`: S3, Google Cloud Storage, Azure and memory.

Only its blocking calls are used, each in a thread: its asynchronous ones answer from a thread of their own, and a
process that ends while such an answer is under way aborts (seen with obstore 0.12 on every third exit).
"""

import asyncio
import contextlib
import errno
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore as Backend

from etude.errors import ObjectExistsError, ObjectMissingError, ObjectSizeError, StoreError
from etude.store.keys import check_key, check_prefix, is_key

MAX_OBJECT_BYTES = 16 << 30
"""Nothing that etude writes is larger; a larger object is refused before it is read."""
_MULTIPART_BYTES = 16 << 20
"""Size above which an object is sent in parts, of which several are under way: it is there once all of them are."""
_PART_BYTES = 8 << 20
"""A request that takes longer than 30 s (`AWS_TIMEOUT`) is made again: parts have to fit in on slow lines too."""
_PARTS_AT_ONCE = 4


class RemoteStore:
    """An `ObjectStore` whose swaps are conditional writes of the store itself."""

    def __init__(self, backend: Backend, *, name: str) -> None:
        """Wrap a backend; `name` is what error messages call it, such as its URL."""
        self._backend = backend
        self.name = name

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the object's bytes."""
        data, _ = await asyncio.to_thread(self._read, check_key(key), max_bytes)
        return data

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Return the object's bytes and tag, or None when the tag is still `tag`: a request without an object."""
        try:
            data, tags = await asyncio.to_thread(self._read, check_key(key), max_bytes, tag)
        except NotModifiedError:
            return None
        return data, tags.get("e_tag", "")

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of the object."""
        check_key(key)
        if length == 0:
            return b""  # the protocols have no way to ask for nothing
        with self._typed("read", key):
            data = await asyncio.to_thread(self._backend.get_range, key, start=start, length=length)
        if len(data) != length:
            msg = f"object {key!r} in {self.name} ends at byte {start + len(data)}, before {start + length}"
            raise ObjectSizeError(msg)
        return data.to_bytes()

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write the whole object.

        A large one is sent in parts, unless it is `create_only`: S3 then refuses more than 5 GiB. An upload that fails
        half way leaves no object; have the bucket delete unfinished uploads after a day, as they cost storage.
        """
        with self._typed("write", check_key(key)):
            await asyncio.to_thread(
                self._backend.put,
                key,
                data,
                mode="create" if create_only else "overwrite",
                use_multipart=len(data) > _MULTIPART_BYTES and not create_only,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Replace the object if its bytes are `expected`.

        A store retries a write whose answer was lost and may then refuse its own success. So a refused swap that finds
        `data` in place counts as won; writers that must tell themselves apart put something of their own into `data`.
        """
        check_key(key)
        mode: Literal["create"] | dict[str, str] = "create"
        if expected is not None:
            try:
                current, mode = await asyncio.to_thread(self._read, key)
            except ObjectMissingError:
                return False
            if current != expected:
                return False
        with self._typed("swap", key):
            try:
                await asyncio.to_thread(self._backend.put, key, data, mode=mode)  # pyright: ignore[reportArgumentType]
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                return await self._holds(key, data)
        return True

    async def list(self, prefix: str) -> list[str]:
        """Return the keys under a folder, sorted; what is not a valid key, such as a staging file, is left out."""
        folder = check_prefix(prefix)
        with self._typed("list", prefix):
            paths = await asyncio.to_thread(_paths, self._backend, folder)
        return sorted(path for path in paths if is_key(path))

    async def delete(self, key: str) -> None:
        """Remove the object; one that is not there is nothing to do."""
        with contextlib.suppress(ObjectMissingError), self._typed("delete", check_key(key)):
            await asyncio.to_thread(self._backend.delete, key)

    def _read(self, key: str, max_bytes: int | None = None, tag: str | None = None) -> tuple[bytes, dict[str, str]]:
        """Return the bytes and the tags that a conditional write of this state has to name.

        Raise `NotModifiedError` when the tag is still `tag`.
        """
        limit = MAX_OBJECT_BYTES if max_bytes is None else max_bytes
        with self._typed("read", key):
            result = self._backend.get(key, options={"if_none_match": tag} if tag else None)
            size = result.meta["size"]
            if size > limit:
                msg = f"object {key!r} in {self.name} has {size} bytes, more than the {limit} allowed here"
                raise ObjectSizeError(msg)
            tags = {"e_tag": result.meta["e_tag"], "version": result.meta["version"]}
            data = result.bytes().to_bytes()
        return data, {name: tag for name, tag in tags.items() if tag is not None}

    async def _holds(self, key: str, data: bytes) -> bool:
        try:
            return await self.get(key) == data
        except ObjectMissingError:
            return False

    @contextmanager
    def _typed(self, action: str, key: str) -> Generator[None]:
        """Turn what the backend raises into errors that name key, store and next action."""
        place = f"object {key!r} in {self.name}"
        try:
            yield
        except NotModifiedError:
            raise
        except FileNotFoundError as error:
            msg = f"{place} does not exist; check the run's URL, or wait until it has been written"
            raise ObjectMissingError(msg) from error
        except AlreadyExistsError as error:
            msg = f"{place} exists already and is write-once; choose another name"
            raise ObjectExistsError(msg) from error
        except (BaseError, OSError, NotImplementedError) as error:
            msg = f"cannot {action} {place}: {explain(error)}"
            raise StoreError(msg) from error


def _paths(backend: Backend, folder: str) -> list[str]:
    entries = backend.list(folder or None).collect()  # pyright: ignore[reportUnknownMemberType]
    return [entry["path"] for entry in entries]


def explain(error: BaseException) -> str:
    """Return one line: what the backend said and what to do about it."""
    text = str(error).split("\n", 1)[0][:500]
    if _is_disk_full(error):
        return "the disk is full; free some space and run the same command again, it resumes"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return f"access denied; check the credentials and rights of this user ({text})"
    return f"{text}; check that the store is reachable, then run the same command again, it resumes"


def _is_disk_full(error: BaseException) -> bool:
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in codes:
        return True
    return any(f"(os error {code})" in str(error) for code in codes)
