"""Policy versions into the store, from a trainer of one rank."""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from etude.errors import IntegrityError, ObjectMissingError, VersionTakenError
from etude.interfaces import Bucket
from etude.weight_types import Head, Manifest, PageName
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.codec import RICE_ULP, Difference
from etude.weights.commits import Announce, Committer, tell_nobody
from etude.weights.fencing import claim
from etude.weights.packing import slices
from etude.weights.paths import read_pages
from etude.weights.ranks import RankWriter
from etude.weights.reader import load_head
from etude.weights.sharded import LocalRanks, Rank, publish_shares
from etude.weights.skips import Skips
from etude.weights.tensors import FlatTensor, snapshot

PublishedDtype = Literal["float32", "bfloat16"]

_TORCH_DTYPES: dict[PublishedDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def new_lineage(head: Head | None) -> str:
    """Return a lineage that nobody used: the next number for people, and a random part."""
    counted = re.match(r"\d{1,9}", head.lineage) if head else None
    return f"{int(counted[0]) + 1 if counted else 1:04d}-{secrets.token_hex(4)}"


def copies(tensors: Mapping[str, Tensor], dtype: PublishedDtype) -> dict[str, FlatTensor]:
    """Return copies in the published dtype, which the next optimizer step does not touch."""
    return snapshot(tensors, dtype=_TORCH_DTYPES[dtype])


class Publisher:
    """The one writer of a chain, until another one takes over.

    What it knows of the published state moves on only when the head has moved, so `publish` may be called again after
    any error, with the same arguments; what is stored by then is not uploaded again.
    """

    def __init__(
        self, committer: Committer, rank: Rank, *, store: Bucket, keys: ChainKeys, dtype: PublishedDtype
    ) -> None:
        """Use `open_publisher`."""
        self._committer = committer
        self._rank = rank
        self._store = store
        self._keys = keys
        self._dtype: PublishedDtype = dtype

    @property
    def lineage(self) -> str:
        """What it publishes into."""
        return self._committer.lineage

    @property
    def head(self) -> Head | None:
        """The head as this publisher last read or wrote it."""
        return self._committer.head

    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, FlatTensor]:
        """Return copies in the published dtype, which the next optimizer step does not touch."""
        return copies(tensors, self._dtype)

    async def publish(self, *, version: int, step: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Publish the weights of a version that is newer than every published one.

        Publishing the newest version again is allowed when its bytes are the same, and changes nothing.

        Raises:
            VersionTakenError: The version exists with other bytes or is older than the head.
            FencedError: Another publisher took over: this one has to end.
            HostError: The disk has no room for the older versions that `skips` needs.
            StoreError: The store failed; only then does repeating the call help.
        """
        return await self.publish_snapshot(version=version, step=step, tensors=self.snapshot(tensors))

    async def publish_snapshot(
        self, *, version: int, step: int, tensors: Mapping[str, FlatTensor], source: str = ""
    ) -> Manifest:
        """As `publish`, for weights copied by `snapshot` earlier; `source` is the digest of what they view."""
        await self._committer.settle()
        self._committer.check(version)
        published = self._committer.published
        if published is not None and published.version < version and self._rank.published != published:
            # The run goes on here from what another process published.
            assert self.head is not None
            loaded = await load_head(self._store, self.head, keys=self._keys)
            await asyncio.to_thread(self._rank.adopt, published, slices(loaded.tensors))
        self._rank.begin(slices(tensors))
        ranks = LocalRanks([self._rank])
        return await publish_shares(self._committer, ranks, self._rank, version=version, step=step, source=source)


async def open_publisher(
    store: Bucket,
    *,
    lineage: str,
    dtype: PublishedDtype = "float32",
    anchor_share: float = 0.5,
    skips: Sequence[int] = (8, 64),
    announce: Announce = tell_nobody,
    difference: Difference = RICE_ULP,
    encoders: int = 1,
    uploads: int = 4,
    keys: ChainKeys = WEIGHTS,
) -> Publisher:
    """Take the chain over from whoever published last, and return a publisher for a lineage: the head's or a new one.

    A new lineage (see `new_lineage`) is needed for a run that goes on from an older version than the newest published.

    Raises:
        VersionTakenError: The lineage has ended: the head is of a later one, maybe because another publisher moved it.
        StoreError: The store failed.
    """
    held = await claim(store, keys=keys)
    if held.head is not None and held.head.lineage != lineage and await _is_known(store, held.head, lineage, keys):
        msg = f"lineage {lineage} ended, the head is of {held.head.lineage}: start a new lineage"
        raise VersionTakenError(msg)
    committer = Committer(store, held, lineage=lineage, keys=keys, announce=announce, anchor_share=anchor_share)
    writer = RankWriter(
        store,
        lineage=lineage,
        keys=keys,
        difference=difference,
        encoders=encoders,
        uploads=uploads,
        resumes=committer.published is not None,
    )
    return Publisher(committer, Rank(writer, Skips(skips)), store=store, keys=keys, dtype=dtype)


async def _is_known(store: Bucket, head: Head, lineage: str, keys: ChainKeys) -> bool:
    """Whether versions of a lineage came before those of the head's."""
    newest = PageName(head.lineage, head.routes)
    try:
        pages = await read_pages(store, newest, enough=lambda page: page.lineage == lineage, keys=keys)
    except (IntegrityError, ObjectMissingError):
        # What is damaged is gone on from in a new lineage, whose name is random.
        return False
    return any(page.lineage == lineage for _, page in pages)
