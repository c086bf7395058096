"""Versions into the chain: manifests, the page of routes that names them, and then the head."""

from collections.abc import Awaitable, Callable, Sequence

from etude.errors import VersionTakenError
from etude.interfaces import ObjectStore
from etude.telemetry.events import Published
from etude.weight_types import Head, Manifest, PageName, Route, RoutePage, VersionName
from etude.weights.chain import WEIGHTS, ChainKeys, check_lineage
from etude.weights.digest import version_digest
from etude.weights.fencing import Claim
from etude.weights.manifests import encode_manifest, parse_manifest
from etude.weights.paths import MAX_PUBLISHED_BYTES, read_manifest, read_routes
from etude.weights.ranks import Share, merged
from etude.weights.routes import MAX_PAGE_BYTES, anchor_is_due, encode_page, extended, parse_page

Announce = Callable[[Published], Awaitable[None]]
"""Hears of a manifest when everything but the head is written; the head moves when it returns."""


async def tell_nobody(_published: Published) -> None:
    """Hear of a version and do nothing."""


class Committer:
    """Makes shares of one or many ranks a version of a lineage."""

    def __init__(
        self,
        store: ObjectStore,
        claim: Claim,
        *,
        lineage: str,
        keys: ChainKeys = WEIGHTS,
        announce: Announce = tell_nobody,
        anchor_share: float = 0.5,
    ) -> None:
        """Commit to a lineage, that of the claimed head or a new one."""
        self.lineage = check_lineage(lineage)
        self._store = store
        self._claim = claim
        self._keys = keys
        self._announce = announce
        self._anchor_share = anchor_share
        self._page: tuple[PageName, RoutePage] | None = None
        self._told: Published | None = None
        self._recent: list[Route] | None = None
        """Routes since the newest anchor, where they are known."""
        self._parent: VersionName | None = None
        """What the head named before the version that is committed."""

    @property
    def head(self) -> Head | None:
        """The head as it was last read or written."""
        return self._claim.head

    @property
    def published(self) -> VersionName | None:
        """What the head names, once it is of this lineage."""
        return _name_of(self.head) if self.head and self.head.lineage == self.lineage else None

    async def settle(self) -> None:
        """Find out what became of the last commit if the store failed; errors as in `commit`."""
        if await self._claim.settle():
            self._recent = None

    def check(self, version: int, digest: str = "") -> None:
        """Raise `VersionTakenError` when the head has passed this version, or names it with other bytes."""
        published = self.published
        if published is None or version > published.version:
            return
        if version < published.version:
            msg = f"version {version} is older than {published.version}, which is published; start a new lineage"
            raise VersionTakenError(msg)
        if digest and digest != published.digest:
            msg = f"version {version} is published with other bytes: a version is never made twice; start a new lineage"
            raise VersionTakenError(msg)

    async def commit(
        self, shares: Sequence[Share], *, version: int, step: int, base: VersionName | None = None, source: str = ""
    ) -> Manifest:
        """Make what the ranks stored, as differences to `base` or standing alone, a way to get to a version.

        `source` is the digest of the version that this one is a view of.
        The head moves to the version when it is not there yet. Once it is, more ways may be added.

        Raises:
            IntegrityError: The shares do not make up a version, or one that readers would refuse.
            VersionTakenError: The version exists with other bytes or is older than the head.
            FencedError: Another publisher took over.
            StoreError: The store failed; repeating the call goes on.
        """
        whole = merged(shares)
        head = self.head
        if head is not None and (head.lineage, head.version) != (self.lineage, version):
            self._parent = _name_of(head)
        manifest = Manifest(
            lineage=self.lineage,
            epoch=self._claim.epoch,
            version=version,
            step=step,
            base=base.version if base else None,
            base_digest=base.digest if base else "",
            digest=version_digest(whole.tensors),
            parent=self._parent,
            source=source,
            tensors=whole.tensors,
            pieces=whole.pieces,
        )
        self.check(version, manifest.digest)
        encoded, name = encode_manifest(manifest)
        # What readers would refuse must not become the head.
        parse_manifest(
            encoded, lineage=self.lineage, version=version, digest=name, max_bytes=MAX_PUBLISHED_BYTES, keys=self._keys
        )
        # Named by its content, so half of an earlier attempt is replaced by the whole.
        await self._store.put(self._keys.manifest(self.lineage, version, name), encoded)
        route = Route(manifest.base, version, whole.num_bytes + len(encoded), name)

        async def head_with_route(head: Head | None) -> Head:
            return await self._with(route, manifest, head)

        recent, self._recent = self._recent, None
        await self._claim.move(head_with_route)
        if recent is not None:
            self._recent = [*recent, route]
        return manifest

    async def missing(self, bases: Sequence[int]) -> list[int | None]:
        """Return from which of these versions, and from nothing (None), a way to the head's version is to be added.

        One from nothing is, once readers that begin would have to fetch too much after the newest anchor.

        Raises:
            StoreError: The store failed, or the routes are damaged.
        """
        head = self.head
        assert head is not None
        routes = await self._routes(head)
        there = {route.base for route in routes if route.version == head.version}
        missing: list[int | None] = [base for base in bases if base not in there]
        if anchor_is_due(routes, head.anchor, share=self._anchor_share):
            missing.append(None)
        return missing

    async def manifest(self) -> Manifest:
        """Return the manifest of the head, the one with the newest base; errors as in `missing`."""
        head = self.head
        assert head is not None
        routes = [route for route in await self._routes(head) if route.version == head.version]
        newest = max(routes, key=lambda route: -1 if route.base is None else route.base)
        manifest = await read_manifest(self._store, head.lineage, newest, keys=self._keys)
        self._parent = manifest.parent
        return manifest

    async def _routes(self, head: Head) -> list[Route]:
        """Return the routes since the newest anchor."""
        if self._recent is None:
            newest = PageName(head.lineage, head.routes)
            self._recent = await read_routes(
                self._store, newest, lineage=head.lineage, since=head.anchor, keys=self._keys
            )
        self._recent = [route for route in self._recent if route.version >= head.anchor]
        return self._recent

    async def _with(self, route: Route, manifest: Manifest, head: Head | None) -> Head:
        name, newest = await self._newest(head)
        if head is not None and newest is not None and route in newest.routes:
            return head  # the swap took effect, though the store said that it did not
        newest = extended(newest, name, self.lineage, [route])
        data, digest = encode_page(newest)
        await self._store.put(self._keys.object(self.lineage, digest), data)
        self._page = (PageName(self.lineage, digest), newest)
        published = Published(
            lineage=self.lineage,
            version=route.version,
            digest=manifest.digest,
            manifest=route.manifest,
            base=route.base,
            epoch=manifest.epoch,
            routes=digest,
            num_bytes=route.num_bytes,
        )
        if published != self._told:
            await self._announce(published)
            self._told = published
        mine = head if head and head.lineage == self.lineage else None
        return Head(
            lineage=self.lineage,
            version=route.version,
            digest=manifest.digest,
            routes=digest,
            anchor=mine.anchor if mine and route.base is not None else route.version,
            floor=mine.floor if mine else route.version,
        )

    async def _newest(self, head: Head | None) -> tuple[PageName | None, RoutePage | None]:
        """Return the name of the page that the head names, and the page if it is of this lineage."""
        if head is None:
            return None, None
        name = PageName(head.lineage, head.routes)
        if head.lineage != self.lineage:
            return name, None
        if self._page is None or self._page[0] != name:
            data = await self._store.get(self._keys.object(name.lineage, name.page), max_bytes=MAX_PAGE_BYTES)
            self._page = (name, parse_page(data, lineage=name.lineage, digest=name.page, keys=self._keys))
        return self._page


def _name_of(head: Head) -> VersionName:
    return VersionName(lineage=head.lineage, version=head.version, digest=head.digest)
