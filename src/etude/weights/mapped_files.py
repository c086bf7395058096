"""Tensors in the files of a directory, read when they are looked at."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.errors import IntegrityError
from etude.weights.shards import Place


class MappedFiles:
    """Maps each file once, however many tensors it has: a process may have 65,530 maps, and fewer open files."""

    def __init__(self, folder: Path) -> None:
        """Map files of a directory as they are now; one that is replaced later is not noticed."""
        self._folder = folder
        self._files: dict[str, NDArray[np.uint8]] = {}

    def bytes_of(self, place: Place) -> NDArray[np.uint8]:
        """Return the bytes of a tensor; raise `IntegrityError` when somebody removed or shortened its file."""
        if not place.size:
            return np.empty(0, np.uint8)
        try:
            data = self._file(place.file)[place.at : place.at + place.size]
        except (FileNotFoundError, ValueError) as error:
            raise self._gone(place, str(error)) from error
        if data.size != place.size:
            raise self._gone(place, "it ends too early")
        return data

    def _file(self, name: str) -> NDArray[np.uint8]:
        found = self._files.get(name)
        if found is None:
            # A view as a plain array: slices of a map are slow to make.
            found = self._files[name] = np.memmap(self._folder / name, np.uint8, mode="r").view(np.ndarray)
        return found

    def _gone(self, place: Place, why: str) -> IntegrityError:
        msg = (
            f"{self._folder / place.file} is not as it was left ({why}): load it anew, and let nobody else write there"
        )
        return IntegrityError(msg)
