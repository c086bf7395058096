"""A Hugging Face directory kept at the newest version of a chain."""

from etude.weight_types import Manifest
from etude.weights.directory import DirectoryState, WeightsDirectory
from etude.weights.downloads import Objects
from etude.weights.follower import PathFollower
from etude.weights.paths import Path, walk
from etude.weights.updates import Update, update_of


class DirectorySink:
    """Builds the versions of a path in a directory; each is complete there before the next is begun."""

    def __init__(self, directory: WeightsDirectory, path: Path) -> None:
        """Show the last version of the path only."""
        self._directory = directory
        self._last = path.manifests[-1].version if path.manifests else 0
        self._update: Update | None = None

    def begin(self, manifest: Manifest) -> None:
        """Prepare the update to a version."""
        state = DirectoryState(
            lineage=manifest.lineage,
            version=manifest.version,
            step=manifest.step,
            digest=manifest.digest,
            state="ready" if manifest.version == self._last else "passing",
        )
        self._update = update_of(self._directory, manifest, state)

    def add(self, manifest: Manifest, name: str, data: bytes) -> None:
        """Take one of its objects."""
        del manifest
        assert self._update is not None
        self._update.add(name, data)

    def end(self, manifest: Manifest) -> None:
        """Make the directory this version."""
        del manifest
        assert self._update is not None
        self._update.commit()


class DirectoryFollower:
    """Follows a chain on disk."""

    def __init__(self, directory: WeightsDirectory, *, paths: PathFollower) -> None:
        """Write to a directory that was opened, and that nobody else writes to."""
        self._directory = directory
        self._paths = paths

    async def poll(self) -> DirectoryState | None:
        """Bring the directory to the head's version; None when it is there or nothing is published.

        Raises:
            IntegrityError: The chain stays damaged, or its head went back.
            StoreError: The store stays out of reach.
            OSError: The disk is full, or refuses; opened again the directory is at the old version or at the new one.
        """
        moved = await self._paths.poll(lambda: self._directory.held, self._arrive)
        self._directory.show()
        return self._directory.state if moved else None

    async def _arrive(self, path: Path, objects: Objects) -> None:
        await walk(path, objects, DirectorySink(self._directory, path), keys=self._paths.keys)
