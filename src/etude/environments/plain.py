"""Directory trees that stand for sandboxes where the kernel grants no namespaces. Standard library only.

Nothing hides the host from a command here; the backend declares so.
"""

import os
from pathlib import Path

from etude.environments import jail, syscalls

_PARENTS = ("/dev/shm", "/tmp")
_PREFIX = "etude-sandbox-"
"""Followed by the sandbox's name, which begins with its backend's."""


def make_root(name: str) -> str:
    """Make a directory that will be the root of a sandbox."""
    parent = next(path for path in _PARENTS if os.access(path, os.W_OK))
    root = f"{parent}/{_PREFIX}{name}"
    os.mkdir(root, 0o711)  # noqa: PTH102
    return root


def roots_of(backend: str) -> list[Path]:
    """Return the roots of a backend's sandboxes that are there."""
    return [root for parent in _PARENTS for root in Path(parent).glob(f"{_PREFIX}{backend}-*")]


def settle(root: str, mounts: list[tuple[str, str]], *, storage_bytes: int, agent_id: int, root_id: int) -> None:
    """Furnish the root, and make this process the keeper of whatever it starts."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    jail.limit_resources(storage_bytes=storage_bytes, pids=None)
    os.chown(root, root_id, root_id)
    jail.make_directories(root, agent_id=agent_id, root_id=root_id)
    for source, target in mounts:
        _copy(Path(source), Path(root + target))


def _copy(source: Path, target: Path) -> None:
    """Copy regular files, because users of the sandbox may have no way to where they are."""
    for folder, _, names in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink():
                (place / name).write_bytes(file.read_bytes())
                (place / name).chmod(0o755 if os.access(file, os.X_OK) else 0o644)


def remove_root(root: str) -> None:
    """Remove a sandbox's tree, following no link."""
    for _, folders, files, directory in os.fwalk(root, topdown=False, onerror=None):
        for name in files:
            os.unlink(name, dir_fd=directory)
        for name in folders:
            try:
                os.rmdir(name, dir_fd=directory)
            except NotADirectoryError:
                os.unlink(name, dir_fd=directory)
    os.rmdir(root)  # noqa: PTH106
