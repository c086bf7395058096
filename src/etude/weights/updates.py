"""From one version of a directory to the next: collected beside it, then made to happen by its journal."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from etude.errors import HostError, IntegrityError
from etude.policy.sum_hash import Sums, from_hex
from etude.weight_types import Box, Manifest, TensorEntry
from etude.weights.boxes import part, runs
from etude.weights.decoding import Decoded, check_digest, decode_object
from etude.weights.digest import box_sums, tensor_digest
from etude.weights.directory import DirectoryState, WeightsDirectory, weight_files
from etude.weights.disk import write_whole
from etude.weights.journal import JournalWriter
from etude.weights.mapped_files import MappedFiles
from etude.weights.memory import HOST
from etude.weights.shards import INDEX, Place, divide, header_of, index_of
from etude.weights.tensors import DTYPES


@runtime_checkable
class Update(Protocol):
    """A change of a directory that is being prepared."""

    def add(self, name: str, data: bytes) -> None:
        """Take one object of the manifest, verified; raise `IntegrityError` when it does not fit the weights."""
        ...

    def commit(self) -> None:
        """Make the directory the manifest's version; raise `IntegrityError` unless that is exactly what it becomes."""
        ...


def update_of(directory: WeightsDirectory, manifest: Manifest, state: DirectoryState) -> Update:
    """Return the update to the version of a manifest, after which the directory says `state`.

    It is in place for differences; beside the old files for an anchor, or where tensors came, went or were reshaped.
    Raise `IntegrityError` unless the directory is at exactly the base of the manifest.
    """
    if manifest.base is None:
        return Anew(directory, manifest, state)
    held = directory.held
    base = (manifest.lineage, manifest.base, manifest.base_digest)
    if held is None or (held.lineage, held.version, held.digest) != base:
        msg = f"{directory.folder} is not at version {manifest.base}, to which {manifest.version} is a difference"
        raise IntegrityError(msg)
    return (InPlace if are_same_tensors(directory.places, manifest) else Anew)(directory, manifest, state)


class InPlace:
    """Differences, to files that stay where they are. The journal holds new values of changed elements only."""

    def __init__(self, directory: WeightsDirectory, manifest: Manifest, state: DirectoryState) -> None:
        """Begin with a directory that is at the base of the manifest."""
        self._directory = directory
        self._files = MappedFiles(directory.folder)
        self._manifest = manifest
        self._state = state
        self._journal = JournalWriter(directory.disk, directory.journal)
        self._sums = {name: from_hex(digest) for name, digest in directory.digests.items()}
        self._whole: set[str] = set()
        """Tensors whose bytes were found to be those of the base."""

    def add(self, name: str, data: bytes) -> None:
        """Write what the object changes into the journal."""
        for found in decode_object(self._manifest, name, data, self._base, memory=HOST):
            entry = found.entry
            if not found.has_hashes:
                self._check_base(entry)
            unsigned = np.dtype(f"<u{DTYPES[entry.dtype].itemsize}")
            old = self._base(entry, found.box)
            elements = found.data.view(unsigned)
            changed = np.flatnonzero(old.view(unsigned) != elements)
            if changed.size:
                place = self._directory.places[entry.name]
                where = _in_tensor(found, changed)
                self._journal.change(self._directory.folder / place.file, place.at, where, elements[changed])
                self._sums[entry.name] = self._sums[entry.name].minus(_sums(found, old)).plus(_sums(found, found.data))

    def commit(self) -> None:
        """Change the files."""
        for entry in self._manifest.tensors:
            check_digest(self._manifest, entry, self._sums[entry.name].hex())
        self._journal.commit(self._state)
        self._directory.carry_out()
        self._directory.settle(self._state, {entry.name: entry.digest for entry in self._manifest.tensors})

    def _check_base(self, entry: TensorEntry) -> None:
        """Sums follow what changes, and so miss what somebody else changed in the rest of the tensor."""
        if entry.name in self._whole:
            return
        if tensor_digest(self._bytes(entry), entry.dtype) != self._directory.digests[entry.name]:
            msg = (
                f"tensor {entry.name!r} in {self._directory.folder} is no longer that of version "
                f"{self._manifest.base}; load the weights from the anchor"
            )
            raise IntegrityError(msg)
        self._whole.add(entry.name)

    def _base(self, entry: TensorEntry, box: Box) -> NDArray[np.uint8]:
        return part(self._bytes(entry), entry.shape, box)

    def _bytes(self, entry: TensorEntry) -> NDArray[np.uint8]:
        return self._files.bytes_of(self._directory.places[entry.name])


class Anew:
    """A whole version, into files beside the old ones, which it then replaces: as a difference to these or without."""

    def __init__(self, directory: WeightsDirectory, manifest: Manifest, state: DirectoryState) -> None:
        """Begin, with tensors in the files where they were if the old files hold the same tensors."""
        self._directory = directory
        self._manifest = manifest
        self._state = state
        tensors = [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]
        like = {name: place.file for name, place in directory.places.items()}
        file_of = divide(tensors, like)
        self._files = sorted(set(file_of.values()))
        self._old = {place.file for place in directory.places.values()} | {INDEX}
        if len(self._files) == 1:
            self._refuse_strangers()
        self._before = MappedFiles(directory.folder)
        self._places: dict[str, Place] = {}
        for file in self._files:
            header, places = header_of([tensor for tensor in tensors if file_of[tensor[0]] == file], file)
            directory.disk.remove(directory.work / file)
            directory.disk.write(directory.work / file, header)
            self._places |= places

    def add(self, name: str, data: bytes) -> None:
        """Write the object's tensors."""
        for found in decode_object(self._manifest, name, data, self._base, memory=HOST):
            place = self._places[found.entry.name]
            begins, run = runs(found.box, found.entry.shape)
            width = DTYPES[found.entry.dtype].itemsize
            for begin, row in zip(begins.tolist(), found.data.reshape(-1, run * width), strict=True):
                self._directory.disk.write(self._directory.work / place.file, row.data, at=place.at + begin * width)

    def commit(self) -> None:
        """Check what was written, then put the files in place."""
        directory = self._directory
        for file in self._files:
            directory.disk.sync(directory.work / file)
        written = MappedFiles(directory.work)
        for entry in self._manifest.tensors:
            data = written.bytes_of(self._places[entry.name])
            check_digest(self._manifest, entry, tensor_digest(data, entry.dtype))
        journal = JournalWriter(directory.disk, directory.journal)
        files = list(self._files)
        if len(files) > 1:
            write_whole(directory.disk, directory.work / INDEX, index_of(self._places))
            files.append(INDEX)
        for file in files:
            journal.move(file)
        for name in sorted((self._old | {path.name for path in weight_files(directory.folder)}).difference(files)):
            journal.remove(name)
        journal.commit(self._state)
        directory.carry_out()
        directory.settle(self._state, {entry.name: entry.digest for entry in self._manifest.tensors})

    def _base(self, entry: TensorEntry, box: Box) -> NDArray[np.uint8]:
        place = self._directory.places.get(entry.name)
        if self._manifest.base is None or place is None or (place.dtype, place.shape) != (entry.dtype, entry.shape):
            msg = f"a difference to a tensor {entry.name!r} that its base lacks is refused; load it from an anchor"
            raise IntegrityError(msg)
        return part(self._before.bytes_of(place), entry.shape, box)

    def _refuse_strangers(self) -> None:
        """Without an index engines load every safetensors file there is, one over the other."""
        folder = self._directory.folder
        ours = {*self._files, *self._old, *(path.name for path in weight_files(folder))}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name not in ours:
                msg = f"engines would load {path} on top of the weights; move it away, or choose another directory"
                raise HostError(msg)


def are_same_tensors(places: Mapping[str, Place], manifest: Manifest) -> bool:
    """Whether the files hold tensors of the names, dtypes and shapes of a manifest."""
    found = {name: (place.dtype, place.shape) for name, place in places.items()}
    return found == {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}


def _in_tensor(found: Decoded[NDArray[np.uint8]], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where elements of a box lie in its tensor; both rise."""
    begins, run = runs(found.box, found.entry.shape)
    return begins.astype(np.int64)[positions // run] + positions % run


def _sums(found: Decoded[NDArray[np.uint8]], data: NDArray[np.uint8]) -> Sums:
    return box_sums(data, dtype=found.entry.dtype, shape=found.entry.shape, box=found.box)
