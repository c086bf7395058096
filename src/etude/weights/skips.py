"""Older versions that readers who are behind may hold, kept on this machine's disk.

Every n versions a difference over n versions is published, so one older version for each n is enough, whatever the
run's length. Its memory is mapped from a file without a name, which the kernel writes out and reads back as it likes
and which is gone when this process is. A publisher that was started anew begins without: the next differences of this
kind come after another n versions.
"""

import os
import tempfile
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from etude.errors import HostError
from etude.weight_types import VersionName
from etude.weights.packing import Slice
from etude.weights.ranks import Snapshot


class Skips:
    """Which versions to skip from, and what they were."""

    def __init__(self, every: Sequence[int]) -> None:
        """Publish a difference over n versions every n versions, for each n of `every`."""
        self._every = sorted(set(every))
        self.kept: dict[int, tuple[VersionName, Snapshot]] = {}
        """By version."""

    def bases(self, version: int) -> dict[int, tuple[VersionName, Snapshot]]:
        """Return the versions from which a difference to this one is due."""
        wanted = [version - n for n in self._every if version % n == 0]
        return {base: self.kept[base] for base in wanted if base in self.kept}

    def keep(self, name: VersionName, snapshot: Snapshot) -> None:
        """Copy a version to the disk if a later one skips from it, and drop those that none skips from any more.

        Raise `HostError` when the disk is full.
        """
        version = name.version
        needed = {version - version % n for n in self._every}
        if version in needed and version not in self.kept:
            self.kept[version] = (name, spilled(snapshot))
        self.kept = {kept: found for kept, found in self.kept.items() if kept in needed}


def spilled(snapshot: Snapshot) -> Snapshot:
    """Return the same slices in memory that is mapped from a file which nobody sees."""
    sizes = [one.data.size for one in snapshot.slices]
    data = _mapped(sum(sizes))
    begins = np.cumsum([0, *sizes])[:-1].tolist()
    copies: list[Slice] = []
    for one, begin in zip(snapshot.slices, begins, strict=True):
        room = data[begin : begin + one.data.size]
        room[:] = one.data
        copies.append(replace(one, data=room))
    return Snapshot(slices=copies, sums=snapshot.sums)


def _mapped(size: int) -> NDArray[np.uint8]:
    if not size:
        return np.empty(0, np.uint8)
    try:
        with tempfile.TemporaryFile(prefix="etude-skip-") as file:
            # Taken now, since a page that the disk has no room for later ends the process.
            os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, np.uint8, mode="r+", shape=(size,))
    except OSError as error:
        msg = (
            f"{tempfile.gettempdir()} has no room for {size} bytes of an older version ({error.strerror}): set TMPDIR "
            f"to a larger disk, or weights.skips = []"
        )
        raise HostError(msg) from error
