"""Policy versions into the store, from a trainer of one rank."""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from etude.interfaces import Bucket
from etude.types import Head, Manifest, PageName, VersionName
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.codec import RICE_ULP, Difference
from etude.weights.commits import Announce, Committer, tell_nobody
from etude.weights.digest import version_digest
from etude.weights.fencing import claim
from etude.weights.packing import slices
from etude.weights.paths import read_manifest, read_routes
from etude.weights.ranks import RankWriter, Snapshot, entries_of, snapshot_of
from etude.weights.reader import load_head
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
        self,
        committer: Committer,
        writer: RankWriter,
        *,
        store: Bucket,
        keys: ChainKeys,
        dtype: PublishedDtype,
        skips: Skips,
    ) -> None:
        """Use `open_publisher`."""
        self._committer = committer
        self._writer = writer
        self._store = store
        self._keys = keys
        self._dtype: PublishedDtype = dtype
        self._skips = skips
        self._published: tuple[VersionName, Snapshot] | None = None
        self._manifest: Manifest | None = None

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
            StoreError: The store failed; only then does repeating the call help.
        """
        return await self.publish_snapshot(version=version, step=step, tensors=self.snapshot(tensors))

    async def publish_snapshot(
        self, *, version: int, step: int, tensors: Mapping[str, FlatTensor], source: str = ""
    ) -> Manifest:
        """As `publish`, for weights that `snapshot` copied earlier; `source` is the digest of what they view."""
        committer = self._committer
        await committer.settle()
        committer.check(version)
        new = slices(tensors)
        head = committer.published
        if head is not None and head.version == version:
            manifest = await self._published_before(head, await asyncio.to_thread(snapshot_of, new))
        else:
            name, base = await self._base()
            share = await self._writer.write(new, base)
            manifest = await committer.commit([share], version=version, step=step, base=name, source=source)
            self._stands_at(manifest, snapshot_of(new, share))
            self._writer.committed()
        await self._add_routes(manifest)
        return manifest

    async def _base(self) -> tuple[VersionName | None, Snapshot | None]:
        """Return what the head names, which a publisher that goes on has to fetch."""
        head = self._committer.published
        if head is None:
            return None, None
        if self._published is None or self._published[0].version != head.version:
            loaded = await load_head(self._store, head, keys=self._keys)
            name = VersionName(lineage=head.lineage, version=head.version, digest=head.digest)
            self._published = name, await asyncio.to_thread(snapshot_of, slices(loaded.tensors))
        return self._published

    async def _published_before(self, head: Head, held: Snapshot) -> Manifest:
        """Return the manifest of the head, whose bytes these have to be."""
        self._committer.check(head.version, version_digest(entries_of(held)))
        if self._manifest is None or self._manifest.version != head.version:
            page = PageName(head.lineage, head.routes)
            routes = await read_routes(self._store, page, lineage=head.lineage, since=head.version, keys=self._keys)
            route = next(route for route in routes if route.version == head.version)
            self._stands_at(await read_manifest(self._store, head.lineage, route, keys=self._keys), held)
        assert self._manifest is not None
        return self._manifest

    def _stands_at(self, manifest: Manifest, held: Snapshot) -> None:
        self._manifest = manifest
        name = VersionName(lineage=manifest.lineage, version=manifest.version, digest=manifest.digest)
        self._published = name, held

    async def _add_routes(self, manifest: Manifest) -> None:
        """Add what readers that are behind, or that begin, go on from; those that follow have the version already."""
        assert self._published is not None
        name, held = self._published
        older = self._skips.bases(manifest.version)
        for missing in await self._committer.missing(list(older)):
            base, snapshot = (None, None) if missing is None else older[missing]
            share = await self._writer.write(held.slices, snapshot)
            await self._committer.commit(
                [share], version=manifest.version, step=manifest.step, base=base, source=manifest.source
            )
        await asyncio.to_thread(self._skips.keep, name, held)


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
    """
    held = await claim(store, keys=keys)
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
    return Publisher(committer, writer, store=store, keys=keys, dtype=dtype, skips=Skips(skips))
