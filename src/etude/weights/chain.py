"""The chain of versions: where its parts lie and what its head looks like.

Objects are written before the manifests that name them, manifests before the page of routes, and that before the head:
whatever the head names is there, by a sha256 at each step. Nothing here does I/O.
"""

import re
from typing import TypeVar

import msgspec

from etude.errors import IntegrityError
from etude.weight_types import Head

FORMAT = 2
MAX_HEAD_BYTES = 4096
_LINEAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WRITER = re.compile(r"[0-9a-f]{0,32}")
_MAX_COUNT = 1 << 53
"""Of versions and epochs: whole numbers that every reader of JSON has."""
_Record = TypeVar("_Record", bound=msgspec.Struct)


class ChainKeys(msgspec.Struct, frozen=True):
    """Where the parts of one chain lie in a run's store."""

    root: str = "weights"

    @property
    def head(self) -> str:
        """The pointer."""
        return f"{self.root}/head"

    @property
    def readers(self) -> str:
        """The folder of the readers' leases."""
        return f"{self.root}/readers"

    def manifest(self, lineage: str, version: int, digest: str) -> str:
        """Return where a manifest lies whose sha256 is `digest`."""
        return f"{self.root}/{lineage}/manifests/{version}-{digest[:16]}.json.zst"

    def object(self, lineage: str, name: str) -> str:
        """Return where an object lies; its name is the sha256 of its bytes."""
        return f"{self.root}/{lineage}/objects/{name}"

    def reader(self, name: str) -> str:
        """Return where the lease of a reader lies."""
        return f"{self.readers}/{name}.json"


WEIGHTS = ChainKeys()
"""Of the policy as it is trained."""
HEAD_KEY = WEIGHTS.head


def parse_head(data: bytes, *, keys: ChainKeys = WEIGHTS) -> Head:
    """Return the head; raise `IntegrityError` when it is not a valid one."""
    place = keys.head
    head = decode_record(data, Head, place, advice="restore it, or start a new run")
    check_lineage(head.lineage, place)
    require(0 <= head.version <= _MAX_COUNT, place, "the version is out of range")
    require(1 <= head.epoch <= _MAX_COUNT, place, "the epoch is out of range")
    require(0 <= head.anchor <= head.version, place, "the anchor is newer than the version")
    require(0 <= head.floor <= head.version, place, "the floor is newer than the version")
    require(is_sha256(head.digest), place, "the digest is not a sha256")
    require(is_sha256(head.routes), place, "the name of its routes is not a sha256")
    require(_WRITER.fullmatch(head.writer) is not None, place, "the writer is no plain name")
    return head


def check_lineage(lineage: str, place: str = HEAD_KEY) -> str:
    """Return the lineage, or raise `IntegrityError` when it is no plain name."""
    require(_LINEAGE.fullmatch(lineage) is not None, place, f"lineage {lineage[:80]!r} is not a plain name")
    return lineage


def is_sha256(text: str) -> bool:
    """Whether a text is the hexadecimal form of a sha256."""
    return _SHA256.fullmatch(text) is not None


class _Format(msgspec.Struct, frozen=True):
    format: int


def decode_record(
    data: bytes, kind: type[_Record], place: str, *, known: int = FORMAT, advice: str = "restore it"
) -> _Record:
    """Return a record of the format `known` out of its JSON.

    Raise `IntegrityError`, which names the place and gives the advice, when it is none.
    """
    try:
        number = msgspec.json.decode(data, type=_Format).format
        if number > known:
            msg = f"{place} is refused: format {number} is not {known}: update this reader"
            raise IntegrityError(msg)
        if number < known:
            msg = f"{place} is refused: format {number} is older than {known}: read it with the etude that wrote it"
            raise IntegrityError(msg)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{place} is damaged: {error}; {advice}"
        raise IntegrityError(msg) from error


def require(holds: bool, place: str, what: str) -> None:  # noqa: FBT001 - the condition is the point
    """Raise `IntegrityError` unless something holds."""
    if not holds:
        msg = f"{place} is refused: {what}"
        raise IntegrityError(msg)
