"""Versions of a trainer of many ranks: each stores its own slices, and the first one commits what all of them wrote.

No weights travel between ranks, only what they wrote: names, boxes and digests. A trainer of one rank is the same.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from etude.weight_types import Manifest, VersionName
from etude.weights.commits import Committer
from etude.weights.digest import version_digest
from etude.weights.packing import Slice
from etude.weights.ranks import RankWriter, Share, Snapshot, entries_of, merged, snapshot_of
from etude.weights.skips import Skips


class Rank:
    """One rank's part: what it holds of the published version, of a few older ones, and of the one under way."""

    def __init__(self, writer: RankWriter, skips: Skips) -> None:
        """Write with `writer`; `skips` are the older versions."""
        self._writer = writer
        self._skips = skips
        self._new: Sequence[Slice] = ()
        self._snapshot: Snapshot | None = None
        """Of the version under way, once it was written or hashed."""
        self._published: tuple[VersionName, Snapshot] | None = None

    @property
    def published(self) -> VersionName | None:
        """The newest published version of which this rank holds its slices."""
        return self._published[0] if self._published else None

    def adopt(self, name: VersionName, slices: Sequence[Slice]) -> None:
        """Take slices of a published version, which were loaded, as what the next version differs from."""
        self._published = name, snapshot_of(slices)

    def begin(self, slices: Sequence[Slice]) -> None:
        """Take this rank's slices of the version under way; nobody changes them from now on."""
        self._new, self._snapshot = slices, None

    def skips(self, version: int) -> dict[int, VersionName]:
        """Return the older versions from which a difference to this one is due, by number."""
        return {base: name for base, (name, _) in self._skips.bases(version).items()}

    async def write(self, base: VersionName | None) -> Share:
        """Store the slices under way as differences to a version, or standing alone.

        They stand alone as well where this rank does not hold that version. Calling it again after an error stores what
        is missing.
        """
        share = await self._writer.write(self._new, self._holds(base))
        self._snapshot = snapshot_of(self._new, share)
        return share

    async def describe(self) -> Share:
        """Return the digests of the slices under way, without storing anything."""
        if self._snapshot is None:
            self._snapshot = await asyncio.to_thread(snapshot_of, self._new)
        return Share(tensors=entries_of(self._snapshot), pieces=(), num_bytes=0)

    def advance(self, name: VersionName) -> None:
        """The head names the version under way: the next one differs from it."""
        assert self._snapshot is not None
        if self.published != name:
            self._published = name, self._snapshot
            self._writer.committed()

    def keep(self, name: VersionName) -> None:
        """Every way to the version is published: keep it, if a later one skips from it. Raises `HostError`."""
        assert self._published is not None
        self._skips.keep(name, self._published[1])

    def _holds(self, base: VersionName | None) -> Snapshot | None:
        if base is None:
            return None
        if self._published is not None and self._published[0] == base:
            return self._published[1]
        name, snapshot = self._skips.kept.get(base.version, (None, None))
        return snapshot if name == base else None


class Ranks(Protocol):
    """All ranks, as the first one reaches them: what each call does is what `Rank` does."""

    async def write(self, base: VersionName | None) -> Sequence[Share]:
        """Have every rank store its slices and return what each wrote; raise what went wrong with one of them."""
        ...

    async def describe(self) -> Sequence[Share]:
        """Return every rank's digests."""
        ...

    async def advance(self, name: VersionName) -> None:
        """Tell every rank that the head names the version under way."""
        ...

    async def keep(self, name: VersionName) -> None:
        """Tell every rank that the version is complete."""
        ...


class LocalRanks:
    """Ranks of this process."""

    def __init__(self, ranks: Collection[Rank]) -> None:
        """Ask these."""
        self._ranks = ranks

    async def write(self, base: VersionName | None) -> Sequence[Share]:
        """See `Ranks`."""
        return await asyncio.gather(*(rank.write(base) for rank in self._ranks))

    async def describe(self) -> Sequence[Share]:
        """See `Ranks`."""
        return await asyncio.gather(*(rank.describe() for rank in self._ranks))

    async def advance(self, name: VersionName) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            rank.advance(name)

    async def keep(self, name: VersionName) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            await asyncio.to_thread(rank.keep, name)


async def publish_shares(
    committer: Committer, ranks: Ranks, first: Rank, *, version: int, step: int, source: str = ""
) -> Manifest:
    """Publish the version that all ranks have under way; `first` is the rank that this runs on.

    Followers have the version before what readers need that are behind, or that begin, is added. Publishing the newest
    version again is allowed when its bytes are the same, and adds what is missing of that.

    Raises:
        IntegrityError: The ranks' slices do not make up every tensor.
        VersionTakenError: The version exists with other bytes or is older than the head.
        FencedError: Another publisher took over: this one has to end.
        StoreError: The store failed; only then does repeating the call help.
    """
    await committer.settle()
    committer.check(version)
    head = committer.published
    if head is not None and head.version == version:
        committer.check(version, version_digest(merged(await ranks.describe()).tensors))
        manifest = await committer.manifest()
    else:
        base = head if head is not None and first.published == head else None
        manifest = await committer.commit(await ranks.write(base), version=version, step=step, base=base, source=source)
    name = VersionName(lineage=manifest.lineage, version=version, digest=manifest.digest)
    await ranks.advance(name)
    older = first.skips(version)
    for missing in await committer.missing(list(older)):
        base = None if missing is None else older[missing]
        await committer.commit(await ranks.write(base), version=version, step=step, base=base, source=source)
    await ranks.keep(name)
    return manifest
