"""Slices of weights into objects, as each rank of a trainer writes its own, and what all ranks wrote as one."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial

import msgspec
from msgspec.structs import replace

from etude.errors import IntegrityError
from etude.interfaces import Bucket
from etude.policy.sum_hash import Sums, from_hex
from etude.weight_types import Box, Piece, TensorEntry
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.codec import RICE_ULP, Difference
from etude.weights.digest import box_sums
from etude.weights.packing import Encoded, Slice, encode_group, groups, place_of
from etude.weights.uploads import Stored, Uploads


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The slices that a rank holds of a version."""

    slices: Sequence[Slice]
    sums: Sequence[Sums]
    """What each adds to the digest of its tensor."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote of a version."""

    tensors: tuple[TensorEntry, ...]
    """The digest of an entry is that of this rank's slice."""
    pieces: tuple[Piece, ...]
    """Their boxes name tensors by their place in `tensors`."""
    num_bytes: int
    """Of the objects."""


class RankWriter:
    """Encodes in threads and uploads meanwhile, in memory that does not grow with the weights."""

    def __init__(
        self,
        store: Bucket,
        *,
        lineage: str,
        keys: ChainKeys = WEIGHTS,
        difference: Difference = RICE_ULP,
        encoders: int = 1,
        uploads: int = 4,
        resumes: bool = False,
    ) -> None:
        """Encode `encoders` groups and upload `uploads` objects at a time.

        With `resumes`, the first version may have been begun by another process: what that stored is not stored again.
        """
        self._difference: Difference = difference
        self._encoders = encoders
        self._limit = uploads
        self._stored = Stored(store, lineage=lineage, keys=keys)
        self._stored.asks = resumes

    async def write(self, new: Sequence[Slice], base: Snapshot | None = None) -> Share:
        """Store slices as differences to those of `base`, or standing alone, and say how.

        Calling it again with the same slices after an error uploads only what is missing.
        """
        known = {place_of(one): sums for one, sums in zip(base.slices, base.sums, strict=True)} if base else {}
        sums = [known.get(place_of(one), Sums()) for one in new]
        uploads = Uploads(self._stored, limit=self._limit)
        try:
            async with aclosing(self._encoded(new, base)) as groups_encoded:
                async for encoded in groups_encoded:
                    for box, added in zip(encoded.boxes, encoded.sums, strict=True):
                        sums[box.tensor] = sums[box.tensor].plus(added)
                    await uploads.add(encoded)
            await uploads.finish()
        finally:
            await uploads.abandon()
        return Share(
            tensors=entries_of(Snapshot(slices=new, sums=sums)),
            pieces=tuple(uploads.pieces),
            num_bytes=uploads.num_bytes,
        )

    def committed(self) -> None:
        """What was written is published: the next version begins with nothing stored."""
        self._stored.asks = False
        self._stored.forget()

    async def _encoded(self, new: Sequence[Slice], base: Snapshot | None) -> AsyncGenerator[Encoded]:
        """Yield groups in their order, so that the same weights give the same objects again."""
        loop = asyncio.get_running_loop()
        encode = partial(encode_group, difference=self._difference)
        with ThreadPoolExecutor(self._encoders, thread_name_prefix="encoder") as threads:
            waiting: deque[asyncio.Future[Encoded]] = deque()
            for group in groups(new, base.slices if base else None):
                waiting.append(loop.run_in_executor(threads, encode, group))
                if len(waiting) > self._encoders:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()


def snapshot_of(slices: Sequence[Slice], share: Share | None = None) -> Snapshot:
    """Return what a rank holds once the share that it wrote is published; without one, sums are computed anew."""
    if share is not None:
        return Snapshot(slices=slices, sums=[from_hex(entry.digest) for entry in share.tensors])
    boxes = (Box(0, one.start, one.size) for one in slices)
    sums = [
        box_sums(one.data, dtype=one.dtype, shape=one.shape, box=box) for one, box in zip(slices, boxes, strict=True)
    ]
    return Snapshot(slices=slices, sums=sums)


def entries_of(snapshot: Snapshot) -> tuple[TensorEntry, ...]:
    """Return an entry per slice, with the digest of this slice: that of the tensor where it is all of it."""
    return tuple(
        TensorEntry(name=one.name, dtype=one.dtype, shape=one.shape, digest=sums.hex())
        for one, sums in zip(snapshot.slices, snapshot.sums, strict=True)
    )


def merged(shares: Sequence[Share]) -> Share:
    """Return the shares of all ranks as that of a single one, sorted by the tensors' names.

    Raise `IntegrityError` when ranks do not agree on a tensor.
    """
    tensors: dict[str, tuple[TensorEntry, Sums]] = {}
    for share in shares:
        for entry in share.tensors:
            first, sums = tensors.setdefault(entry.name, (entry, Sums()))
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                msg = f"tensor {entry.name!r} has another dtype or shape on another rank; publish the same tensors"
                raise IntegrityError(msg)
            tensors[entry.name] = (first, sums.plus(from_hex(entry.digest)))
    places = {name: place for place, name in enumerate(sorted(tensors))}
    pieces = (
        replace(piece, boxes=tuple(replace(box, tensor=places[share.tensors[box.tensor].name]) for box in piece.boxes))
        for share in shares
        for piece in share.pieces
    )
    entries = (replace(tensors[name][0], digest=tensors[name][1].hex()) for name in places)
    return Share(tensors=tuple(entries), pieces=tuple(pieces), num_bytes=sum(share.num_bytes for share in shares))
