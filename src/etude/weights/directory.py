"""A plain Hugging Face directory that is at one version or at the next, whenever its process ends.

`etude.version` says what the weights are. It says `changing` before the first of their bytes changes and `ready` after
the last: who reads it before and after loading the weights, and finds the same ready version twice, has that version.
Of several differences that are applied one after the other only the last one's version is shown as ready.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from etude.errors import HostError, IntegrityError
from etude.store.file_locks import holder_of, try_lock
from etude.weight_types import TensorEntry
from etude.weights.chain import decode_record
from etude.weights.digest import tensor_digest, version_digest
from etude.weights.disk import Disk, LocalDisk, write_whole
from etude.weights.journal import read_end, replay
from etude.weights.mapped_files import MappedFiles
from etude.weights.paths import Held
from etude.weights.shards import Place, find_places

VERSION_FILE = "etude.version"
_MAX_STATE_BYTES = 4096


class DirectoryState(msgspec.Struct, frozen=True, kw_only=True):
    """What `etude.version` holds."""

    lineage: str
    version: int
    step: int
    digest: str
    """Of the version, as in its manifest."""
    state: Literal["ready", "passing", "changing"] = "ready"
    """`passing`: whole, but on the way to another version, and so not to be loaded."""
    format: int = 1


def read_state(folder: Path) -> DirectoryState | None:
    """Return what a directory says of its weights; None when it says nothing.

    Raise `IntegrityError` when it cannot be understood.
    """
    path = folder / VERSION_FILE
    try:
        with path.open("rb") as opened:
            data = opened.read(_MAX_STATE_BYTES)
    except FileNotFoundError:
        return None
    return decode_record(data, DirectoryState, str(path), known=1, advice="delete it, and the weights are loaded anew")


class WeightsDirectory:
    """The only writer of a directory's weights. Opening it completes what a killed one left half done."""

    def __init__(self, folder: Path, *, disk: Disk | None = None) -> None:
        """Create the directory if need be, recover, and read all weights once to check that they are what it says.

        Raises:
            HostError: Another process keeps the directory current.
            OSError: The disk is full, or refuses.
        """
        self.folder = folder
        self.work = folder / ".etude"
        """What is not in place yet."""
        self.disk: Disk = disk or LocalDisk()
        self.journal = self.work / "journal"
        self.state: DirectoryState | None = None
        """What the weights are; None when they are not known to be any version."""
        self.why = "it is empty"
        """Why `state` is None."""
        self.digests: dict[str, str] = {}
        """Of each tensor, where `state` is known."""
        self.places: dict[str, Place] = {}
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    @property
    def held(self) -> Held | None:
        """What a reader has that has this directory."""
        state = self.state
        return None if state is None else Held(lineage=state.lineage, version=state.version, digest=state.digest)

    def close(self) -> None:
        """Let another process write."""
        os.close(self._lock)

    def carry_out(self) -> None:
        """Do what the journal says, all of it or, after a crash, the rest of it. Raise `OSError` if the disk does."""
        end = read_end(self.journal)
        assert end is not None
        state = msgspec.json.decode(end.state, type=DirectoryState)
        self._say(msgspec.structs.replace(state, state="changing"))
        replay(self.disk, self.journal, self.folder)
        self._say(state)
        self.disk.remove(self.journal)
        self.disk.sync(self.work)

    def show(self) -> None:
        """Say that the version is ready, if it was only passed through, because it is the one that is wanted now."""
        if self.state is not None and self.state.state == "passing":
            self.state = msgspec.structs.replace(self.state, state="ready")
            self._say(self.state)

    def settle(self, state: DirectoryState, digests: Mapping[str, str]) -> None:
        """Take over what `carry_out` made of the directory."""
        self.state, self.digests, self.places = state, dict(digests), find_places(self.folder)

    def _recover(self) -> None:
        try:
            if read_end(self.journal) is not None:
                self.carry_out()
        except IntegrityError as error:
            self._forget(str(error))
        else:
            self._check()
        for path in self.work.iterdir():
            if path.name != "lock":
                self.disk.remove(path)

    def _check(self) -> None:
        """Take the directory for what it says only if its bytes are that."""
        try:
            state = read_state(self.folder)
            self.places = find_places(self.folder)
        except IntegrityError as error:
            self._forget(str(error))
            return
        if state is None or state.state == "changing":
            self.why = (
                f"{self.folder / VERSION_FILE} {'is not there' if state is None else 'tells of a cut-off change'}"
            )
            return
        entries = list(self._entries())
        if version_digest(entries) != state.digest:
            self.why = f"the weights in {self.folder} are not version {state.version}, as {VERSION_FILE} says"
            return
        used = {place.file for place in self.places.values()}
        if more := [path.name for path in weight_files(self.folder) if path.name not in used]:
            self.why = f"{self.folder} has {more[0]} as well, which engines may load in place of the weights"
            return
        self.state, self.digests = state, {entry.name: entry.digest for entry in entries}

    def _entries(self) -> Iterator[TensorEntry]:
        files = MappedFiles(self.folder)
        for name, place in self.places.items():
            digest = tensor_digest(files.bytes_of(place), place.dtype)
            yield TensorEntry(name=name, dtype=place.dtype, shape=place.shape, digest=digest)

    def _forget(self, why: str) -> None:
        self.state, self.digests, self.places, self.why = None, {}, {}, why

    def _say(self, state: DirectoryState) -> None:
        write_whole(self.disk, self.folder / VERSION_FILE, msgspec.json.encode(state) + b"\n")

    def _take_lock(self) -> int:
        descriptor = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if try_lock(descriptor, self.folder):
                return descriptor
            holder = holder_of(descriptor, self.work / "lock")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        msg = f"another process keeps {self.folder} current, {holder}; or choose another directory"
        raise HostError(msg)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that engines take for the model's weights, whoever wrote them."""
    return [path for path in sorted(folder.glob("model*.safetensors")) if path.is_symlink() or not path.is_dir()]
