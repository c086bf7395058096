"""Which agent program was played. A changed harness is a changed environment, so every rollout says which it was."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from etude import __version__
from etude.config import HarnessSection
from etude.errors import HarnessError
from etude.rollout.harness import harness_directory, harness_name

FACTS_FILE = "harness.json"
"""In a harness's directory: its `name` and `version`."""

_MAX_FACTS_BYTES = 64 << 10
_CACHES = "__pycache__"


class HarnessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """An agent program as it was configured."""

    name: str
    version: str = "unknown"
    config_hash: str = ""
    """sha256 over the section `harness` of the configuration and all files of the program."""


class _Facts(msgspec.Struct, frozen=True):
    name: str
    version: str


def identify(section: HarnessSection) -> HarnessIdentity:
    """Return what a harness is; it reads all of its files, so call it in a thread.

    Name and version are those in the `harness.json` of its directory. A directory without one gives its own name and
    the version `unknown`; the built-in harness has etude's version.

    Raises:
        HarnessError: The directory is missing, a file cannot be read, or `harness.json` is malformed.
    """
    root = harness_directory(section)
    total = hashlib.sha256(msgspec.json.encode(section.model_dump(mode="json", exclude={"files"}), order="sorted"))
    try:
        for path in _files(root):
            total.update(f"\n{path.relative_to(root)} {_digest(path)}".encode("utf-8", "surrogateescape"))
        facts = _stated(root / FACTS_FILE)
    except OSError as error:
        msg = f"{error.filename}: the harness cannot be read ({error.strerror}): install it again"
        raise HarnessError(msg) from error
    if facts is None:
        facts = _Facts(harness_name(section), "unknown" if section.files else __version__)
    return HarnessIdentity(name=facts.name, version=facts.version, config_hash=total.hexdigest())


def _files(root: Path) -> Iterator[Path]:
    """Yield files and links in a fixed order, without what interpreters cache."""
    for folder, folders, names in os.walk(root):
        linked = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = sorted(set(folders) - {_CACHES, *linked})
        yield from (Path(folder, name) for name in sorted([*names, *linked]))


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    with path.open("rb") as file:
        kind = "x" if os.fstat(file.fileno()).st_mode & 0o100 else "-"
        return f"{kind} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _stated(path: Path) -> _Facts | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        content = file.read(_MAX_FACTS_BYTES)
    try:
        return msgspec.json.decode(content, type=_Facts)
    except msgspec.MsgspecError as error:
        msg = f'{path}: {error}; it must look like {{"name": "my-agent", "version": "1.2.0"}}'
        raise HarnessError(msg) from error
