"""Objects behind `obstore`: S3, Google Cloud Storage, Azure and memory.

Only its blocking calls are used, each in a thread: its asynchronous ones answer from a thread of their own, and a
process that ends while such an answer is under way aborts (seen with obstore 0.12 on every third exit).
"""

import asyncio
import contextlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PreconditionError,
)
from obstore.store import ObjectStore as Backend

from etude.errors import ObjectExistsError, ObjectMissingError, ObjectSizeError, StoreError
from etude.store.explaining import explain, is_bucket_missing
from etude.store.keys import check_key, check_prefix, is_key

MAX_OBJECT_BYTES = 16 << 30
"""Nothing that etude writes is larger; a larger object is refused before it is read."""
_MULTIPART_BYTES = 16 << 20
"""Size above which an object is sent in parts, of which several are under way: it is there once all of them are."""
_PART_BYTES = 8 << 20
"""A request that takes longer than 30 s (`AWS_TIMEOUT`) is made again: parts have to fit in on slow lines too."""
_PARTS_AT_ONCE = 4
_CONFLICT_PAUSES_S = (0.05, 0.2, 0.8)
"""Before a write is tried again that met another one on its way: nothing was written then."""
_Condition = Literal["create"] | dict[str, str]


class RemoteStore:
    """An `ObjectStore` whose swaps are conditional writes of the store itself."""

    def __init__(self, backend: Backend, *, name: str) -> None:
        """Wrap a backend; `name` is what error messages call it, such as its URL."""
        self._backend = backend
        self.name = name
        self._bare_tags = False
        """Whether this store says its tags in quotes, but knows them only without."""

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
        """Write the whole object; one that is `create_only` and finds its own bytes in place has succeeded before.

        A large one is sent in parts, unless it is `create_only`: S3 then refuses more than 5 GiB. An upload that fails
        half way leaves no object; have the bucket delete unfinished uploads after a day, as they cost storage.
        """
        check_key(key)
        for pause_s in _CONFLICT_PAUSES_S:
            if await self._put(key, data, create_only=create_only):
                return
            await asyncio.sleep(pause_s)
        if not await self._put(key, data, create_only=create_only):
            msg = f"cannot write object {key!r} in {self.name}: other writes to it went on; end them, then try again"
            raise StoreError(msg)

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Replace the object if its bytes are `expected`.

        A store retries a write whose answer was lost and may then refuse its own success. So a refused swap that finds
        `data` in place counts as won; writers that must tell themselves apart put something of their own into `data`.
        """
        check_key(key)
        if expected is None:
            refusal = await self._refusal(key, data, "create")
            return refusal is None or (await self._state(key))[0] == data
        current, tags = await self._state(key)
        for condition in self._conditions(tags):
            if current != expected:
                break
            refusal = await self._refusal(key, data, condition)
            if refusal is None:
                self._bare_tags = condition != tags
                return True
            current, _ = await self._state(key)
            if current == data:
                return True
            if not isinstance(refusal, PreconditionError):
                break
        return False

    async def list(self, prefix: str) -> list[str]:
        """Return the keys under a folder, sorted; what is not a valid key, such as a staging file, is left out."""
        folder = check_prefix(prefix)
        with self._typed("list", prefix):
            paths = await asyncio.to_thread(_paths, self._backend, folder)
        # A marker, which consoles make for a folder, is listed as if it were an object of the folder's name.
        return sorted(path for path in paths if is_key(path) and path != folder)

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

    async def _put(self, key: str, data: bytes, *, create_only: bool) -> bool:
        """Return whether it was written; when not, another write of the object was on its way."""
        with self._typed("write", key):
            try:
                await asyncio.to_thread(
                    self._backend.put,
                    key,
                    data,
                    mode="create" if create_only else "overwrite",
                    use_multipart=len(data) > _MULTIPART_BYTES and not create_only,
                    chunk_size=_PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            except AlreadyExistsError:
                # The client says so too when the store answers 409, which only asks to try again.
                there = (await self._state(key))[0] if create_only else None
                if there is not None and there != data:
                    raise
                return there is not None
        return True

    async def _refusal(self, key: str, data: bytes, condition: _Condition) -> Exception | None:
        """Write under a condition; return what the store says when it does not hold."""
        with self._typed("swap", key):
            try:
                await asyncio.to_thread(self._backend.put, key, data, mode=condition)  # pyright: ignore[reportArgumentType]
            except (PreconditionError, AlreadyExistsError) as error:
                return error
            except FileNotFoundError as error:
                if is_bucket_missing(error):
                    raise
                return error
        return None

    def _conditions(self, tags: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yield the ways to name the state with these tags: Ceph and DigitalOcean know theirs only without quotes."""
        named, tag = dict(tags), tags.get("e_tag", "")
        ways = [named, named | {"e_tag": tag.strip('"')}] if tag.startswith('"') else [named]
        yield from reversed(ways) if self._bare_tags else ways

    async def _state(self, key: str) -> tuple[bytes | None, dict[str, str]]:
        try:
            return await asyncio.to_thread(self._read, key)
        except ObjectMissingError:
            return None, {}

    @contextmanager
    def _typed(self, action: str, key: str) -> Generator[None]:
        """Turn what the backend raises into errors that name key, store and next action."""
        place = f"object {key!r} in {self.name}"
        try:
            yield
        except NotModifiedError:
            raise
        except FileNotFoundError as error:
            if is_bucket_missing(error):
                msg = f"cannot {action} {place}: {explain(error)}"
                raise StoreError(msg) from error
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
