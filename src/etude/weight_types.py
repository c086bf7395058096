"""The records that a weight chain consists of: what lies in the store between trainer and samplers."""

import msgspec


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a version; which bytes it is made of is told by the boxes that name it."""

    name: str
    """Canonical Hugging Face name."""
    dtype: str
    """As in safetensors: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]
    digest: str
    """Of the tensor's bytes at this version, however they are divided (`weights.digest.tensor_digest`)."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor with edges along its axes: `[tensor, [start, ...], [size, ...]]`."""

    tensor: int
    """Place of the tensor in the manifest's list."""
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A span of an object, and the boxes that are coded in it one after the other, each in row-major order."""

    object: str
    """Name of the object: sha256 of its bytes."""
    offset: int
    length: int
    encoding: str
    """`raw`, another encoding that stands alone, or one of the difference to the base version."""
    boxes: tuple[Box, ...]
    """Of tensors of one dtype. All boxes of a tensor together cover each of its elements once."""


class VersionName(msgspec.Struct, frozen=True, kw_only=True):
    """A version and what it is made of."""

    lineage: str
    version: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One way to get to a policy version. Written after its objects and before the list that names it."""

    lineage: str
    epoch: int
    """Of the publisher that wrote it."""
    version: int
    step: int
    base: int | None
    """Version that the differences apply to; None for an anchor, which stands alone."""
    base_digest: str = ""
    digest: str
    """Of the whole version: over all tensors' names, dtypes, shapes and digests."""
    parent: VersionName | None = None
    """What the head named before; None for the first version of a run."""
    source: str = ""
    """Digest of the version that this is a view of, as who derived it says; empty for the policy as it is trained.

    `etude weights verify --view` makes the view again and compares.
    """
    tensors: tuple[TensorEntry, ...]
    pieces: tuple[Piece, ...]
    format: int = 2


class Route(msgspec.Struct, frozen=True, array_like=True):
    """A manifest, and where it leads: `[base, version, bytes, manifest]`."""

    base: int | None
    """Version that a reader has to hold; None for an anchor."""
    version: int
    num_bytes: int
    """Of the manifest and its objects."""
    manifest: str
    """sha256 of the manifest."""


class PageName(msgspec.Struct, frozen=True, array_like=True):
    """Where a page of routes lies: `[lineage, sha256]`."""

    lineage: str
    page: str


class RoutePage(msgspec.Struct, frozen=True, kw_only=True):
    """Routes to neighbouring versions; pages form a list, of which the head names the newest."""

    lineage: str
    routes: tuple[Route, ...]
    """By version."""
    older: PageName | None = None
    """The page with the versions before, maybe of the lineage before; None for the first of a run."""
    format: int = 2


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The pointer to the newest version, replaced by compare-and-swap."""

    lineage: str
    version: int
    digest: str
    epoch: int = 1
    """Grows with every publisher: one that finds a greater one than its own has been replaced."""
    writer: str = ""
    """Random name of the publisher: tells a swap whose answer was lost from one that another publisher won."""
    routes: str = ""
    """sha256 of the newest page of routes."""
    anchor: int
    """Newest anchor of the lineage at or before `version`."""
    floor: int = 0
    """Oldest version whose objects are kept."""
    format: int = 2
