"""Model directories for engines of any kind: kept current, or written once."""

import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from etude.errors import IntegrityError, StoreError
from etude.interfaces import Clock, ErasableStore
from etude.weights.chain import ChainKeys
from etude.weights.directory import DirectoryState, WeightsDirectory
from etude.weights.follow_directory import DirectoryFollower, DirectorySink
from etude.weights.follower import PathFollower
from etude.weights.history import find_version, require_head
from etude.weights.paths import MAX_VERSION_BYTES, find_path, walk
from etude.weights.sources import open_source

_COPIED = (".json", ".txt", ".model", ".jinja")
_MAX_FILE_BYTES = 1 << 30


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a directory follows a chain; see `open_source`."""

    folder: Path
    poll_s: float = 2.0
    cache: Path | None = None
    cluster: str = ""
    listen: str = "127.0.0.1"
    reader: str = ""


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
        HostError: Another process writes to the directory, or an address is taken.
        OSError: The disk is full, or refuses.
    """
    directory = WeightsDirectory(options.folder)
    try:
        async with open_source(
            store,
            clock=clock,
            keys=keys,
            reader=options.reader,
            cache=options.cache,
            cluster=options.cluster,
            listen=options.listen,
        ) as source:
            paths = PathFollower(
                store, clock=clock, keys=keys, poll_s=options.poll_s, objects=source.objects, lease=source.lease
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
    finally:
        directory.close()


async def materialised(
    store: ErasableStore, keys: ChainKeys, name: str, folder: Path, *, clock: Clock
) -> DirectoryState:
    """Make a directory the version of that name (see `find_version`) and return what it is then.

    Raises:
        ConfigError: The version is not kept.
        StoreError: It is damaged or out of reach; the directory is what it was, or a version on the way.
    """
    lineage, version = await find_version(store, name, keys=keys)
    directory = WeightsDirectory(folder)
    try:
        async with open_source(store, clock=clock, keys=keys) as source:
            await source.lease.hold(lineage, 0, wanted=version)
            head = await require_head(store, keys=keys)
            path = await find_path(
                store, head, held=directory.held, target=(lineage, version), max_bytes=MAX_VERSION_BYTES, keys=keys
            )
            objects = source.lease.renewing(source.objects, lineage, 0, wanted=version)
            await walk(path, objects, DirectorySink(directory, path), keys=keys)
        directory.show()
        if directory.state is None or directory.state.version != version:
            msg = f"{folder} is not at version {version}: {directory.why}"
            raise IntegrityError(msg)
        return directory.state
    finally:
        directory.close()


def copy_files(source: Path, folder: Path) -> None:
    """Copy configuration and tokenizer of a model directory, but no weights and nothing that is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        wanted = path.suffix in _COPIED and not path.name.startswith((".", "model.safetensors"))
        if wanted and path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
