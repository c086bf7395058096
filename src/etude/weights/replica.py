"""Model directories for engines of any kind: kept current, or written once."""

import errno
import shutil
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from etude.errors import HostError, IntegrityError, StoreError
from etude.interfaces import Clock, ErasableStore
from etude.weights.chain import ChainKeys
from etude.weights.directory import DirectoryState, WeightsDirectory
from etude.weights.follow_directory import DirectoryFollower, DirectorySink
from etude.weights.follower import PathFollower
from etude.weights.history import find_version, require_head
from etude.weights.paths import MAX_PUBLISHED_BYTES, find_path, walk
from etude.weights.sources import open_source

_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Configuration, tokenizers of all kinds, templates, and the code of models that bring their own."""
_INDEX = ".index.json"
"""What a list of weight files is called, of which none is copied."""
_MAX_FILE_BYTES = 1 << 30


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a directory follows a chain; see `open_source`."""

    folder: Path
    poll_s: float = 2.0
    cache: Path | None = None
    cluster: str = ""
    listen: str = "127.0.0.1"
    reader: str = ""
    leased: bool = True


async def follow_into(
    store: ErasableStore,
    keys: ChainKeys,
    options: ReplicaOptions,
    *,
    clock: Clock,
    once: bool,
    report: Callable[[StoreError], None],
) -> AsyncGenerator[DirectoryState]:
    """Yield what the directory is, first and whenever it is another version; forever, or `once` it is at the head's.

    Raises:
        StoreError: The chain cannot be read and `once` was asked for; else it is reported, and tried again.
        HostError: Another process writes to the directory, this user may not, or an address is taken.
        OSError: The disk is full, or fails.
    """
    with _opened(options.folder) as directory:
        async with open_source(
            store,
            clock=clock,
            keys=keys,
            reader=options.reader,
            cache=options.cache,
            cluster=options.cluster,
            listen=options.listen,
            leased=options.leased,
        ) as source:
            paths = PathFollower(
                store,
                clock=clock,
                keys=keys,
                poll_s=options.poll_s,
                max_bytes=MAX_PUBLISHED_BYTES,
                objects=source.objects,
                lease=source.lease,
            )
            follower = DirectoryFollower(directory, paths=paths)
            if directory.state is not None and directory.state.state == "ready":
                yield directory.state
            if once:
                await require_head(store, keys=keys)
                state = await follower.poll()
                if state is not None:
                    yield state
                return
            while True:
                try:
                    state = await follower.poll()
                except StoreError as error:
                    report(error)
                else:
                    if state is not None:
                        yield state
                await paths.pause()


async def materialised(
    store: ErasableStore, keys: ChainKeys, name: str, folder: Path, *, clock: Clock, leased: bool = True
) -> DirectoryState:
    """Make a directory the version of that name (see `find_version`) and return what it is then.

    Raises:
        ConfigError: The version is not kept.
        StoreError: It is damaged or out of reach; the directory is what it was, or a version on the way.
    """
    lineage, version = await find_version(store, name, keys=keys)
    with _opened(folder) as directory:
        async with open_source(store, clock=clock, keys=keys, leased=leased) as source:
            objects = source.objects
            if source.lease is not None:
                await source.lease.hold(lineage, 0, wanted=version)
                objects = source.lease.renewing(objects, lineage, 0, wanted=version)
            head = await require_head(store, keys=keys)
            path = await find_path(
                store, head, held=directory.held, target=(lineage, version), max_bytes=MAX_PUBLISHED_BYTES, keys=keys
            )
            await walk(path, objects, DirectorySink(directory, path), keys=keys)
        directory.show()
        if directory.state is None or directory.state.version != version:
            msg = f"{folder} is not at version {version}: {directory.why}"
            raise IntegrityError(msg)
        return directory.state


@contextmanager
def _opened(folder: Path) -> Generator[WeightsDirectory]:
    """Yield a directory to write to; raise `HostError` where this user may not."""
    try:
        directory = WeightsDirectory(folder)
        try:
            yield directory
        finally:
            directory.close()
    except PermissionError as error:
        raise _not_ours(error, folder) from error
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise _not_ours(error, folder) from error


def _not_ours(error: OSError, folder: Path) -> HostError:
    place = error.filename or folder
    return HostError(f"cannot write {place}: {error.strerror}; give this user the right, or choose another directory")


def copy_files(source: Path, folder: Path) -> None:
    """Copy configuration and tokenizer of a model directory, but no weights and nothing that is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        wanted = path.suffix in _COPIED and not path.name.startswith(".") and not path.name.endswith(_INDEX)
        if wanted and path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
