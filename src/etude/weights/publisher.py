"""Policy versions into the store: objects, then the manifest, then the head."""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec
import torch
from torch import Tensor

from etude.errors import ObjectExistsError, StoreError, VersionTakenError
from etude.interfaces import ObjectStore
from etude.telemetry.events import Published
from etude.types import Head, Manifest
from etude.weights.chain import (
    HEAD_KEY,
    MAX_MANIFEST_BYTES,
    check_lineage,
    manifest_key,
    object_key,
    parse_manifest,
)
from etude.weights.codec import RICE_ULP, Difference
from etude.weights.digest import tensor_digest
from etude.weights.packing import pack
from etude.weights.reader import MAX_VERSION_BYTES, LoadedVersion, load_head, read_head
from etude.weights.tensors import FlatTensor, snapshot

PublishedDtype = Literal["float32", "bfloat16"]

_TORCH_DTYPES: dict[PublishedDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SWAP_ATTEMPTS = 5

Announce = Callable[[Published], Awaitable[None]]
"""Hears of a version when everything but the head is written; the head moves when it returns."""


async def _tell_nobody(_published: Published) -> None:
    return


def new_lineage(head: Head | None) -> str:
    """Return a lineage that nobody used: the next number for people, and a random part."""
    counted = re.match(r"\d{1,9}", head.lineage) if head else None
    return f"{int(counted[0]) + 1 if counted else 1:04d}-{secrets.token_hex(4)}"


class Publisher:
    """The one writer of a lineage.

    What it knows of the published state moves on only when the head has moved, so `publish` may be called again after
    any error, with the same arguments. Two publishers on one run cannot both win: the loser gets a `StoreError`.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        lineage: str,
        dtype: PublishedDtype,
        anchor_every: int,
        head: Head | None,
        published: LoadedVersion | None,
        announce: Announce = _tell_nobody,
        difference: Difference = RICE_ULP,
    ) -> None:
        """Go on from a head and, if it is of this lineage, the weights it names; `open_publisher` reads both."""
        self.lineage = check_lineage(lineage)
        self._store = store
        self._dtype = _TORCH_DTYPES[dtype]
        self._anchor_every = anchor_every
        self._head = head
        self._published = published
        self._announce = announce
        self._difference: Difference = difference

    @property
    def head(self) -> Head | None:
        """The head as this publisher last read or wrote it."""
        return self._head

    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, FlatTensor]:
        """Return copies in the published dtype, which the next optimizer step does not touch."""
        return snapshot(tensors, dtype=self._dtype)

    async def publish(self, *, version: int, step: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Publish the weights of a version that is newer than every published one.

        Publishing the newest version again is allowed when its bytes are the same, and changes nothing.

        Raises:
            VersionTakenError: The version exists with other bytes or is older than the head.
            StoreError: Another publisher moved the head, or the store failed; only then does repeating the call help.
        """
        return await self.publish_snapshot(version=version, step=step, tensors=self.snapshot(tensors))

    async def publish_snapshot(self, *, version: int, step: int, tensors: Mapping[str, FlatTensor]) -> Manifest:
        """As `publish`, for weights that `snapshot` copied earlier."""
        published = self._published
        if published and version < published.version:
            msg = f"version {version} is older than {published.version}, which is published; start a new lineage"
            raise VersionTakenError(msg)
        if published and version == published.version:
            return await self._published_before(published, tensors)
        is_anchor = self._head is None or version - self._head.anchor >= self._anchor_every
        base = None if is_anchor else published
        manifest, objects = await asyncio.to_thread(
            pack, tensors, lineage=self.lineage, version=version, step=step, base=base, difference=self._difference
        )
        encoded = await self._write(manifest, objects)
        await self._announce(
            Published(
                lineage=self.lineage,
                version=version,
                digest=manifest.digest,
                manifest=hashlib.sha256(encoded).hexdigest(),
                num_bytes=sum(map(len, objects.values())),
            )
        )
        await self._move_head(manifest)
        self._published = LoadedVersion(
            lineage=self.lineage, version=version, digest=manifest.digest, step=step, tensors=dict(tensors)
        )
        return manifest

    async def _write(self, manifest: Manifest, objects: Mapping[str, bytes]) -> bytes:
        """Put the objects and then the manifest, whose bytes are returned."""
        key = manifest_key(self.lineage, manifest.version)
        encoded = msgspec.json.encode(manifest)
        # A version that readers would refuse must not become the head.
        parse_manifest(encoded, lineage=self.lineage, version=manifest.version, max_bytes=MAX_VERSION_BYTES)
        for name, data in objects.items():
            # Not create-only: a store may hold half of an earlier attempt, and this name admits only these bytes.
            await self._store.put(object_key(self.lineage, name), data)
        try:
            await self._store.put(key, encoded, create_only=True)
        except ObjectExistsError:
            if await self._store.get(key, max_bytes=MAX_MANIFEST_BYTES) != encoded:
                msg = f"{key} exists with other bytes: a version is never made twice; start a new lineage"
                raise VersionTakenError(msg) from None
        return encoded

    async def _move_head(self, manifest: Manifest) -> None:
        anchor = manifest.version if manifest.base is None or self._head is None else self._head.anchor
        head = Head(lineage=self.lineage, version=manifest.version, digest=manifest.digest, anchor=anchor)
        data = msgspec.json.encode(head)
        expected = msgspec.json.encode(self._head) if self._head else None
        for _ in range(_SWAP_ATTEMPTS):
            swapped = await self._store.compare_and_swap(HEAD_KEY, data, expected=expected)
            # A store may refuse a swap that it carried out, or one that nothing stood in the way of.
            current = head if swapped else await read_head(self._store)
            if current == head:
                self._head = head
                return
            if current != self._head:
                break
        msg = (
            f"{HEAD_KEY} was moved by another trainer while version {manifest.version} was published; "
            f"only one may train into a run: end this one"
        )
        raise StoreError(msg)

    async def _published_before(self, published: LoadedVersion, tensors: Mapping[str, FlatTensor]) -> Manifest:
        """Return the manifest of the newest version, whose bytes these must be."""
        version = published.version
        data = await self._store.get(manifest_key(self.lineage, version), max_bytes=MAX_MANIFEST_BYTES)
        manifest = parse_manifest(data, lineage=self.lineage, version=version, max_bytes=MAX_VERSION_BYTES)
        known = {entry.name: (entry.dtype, entry.shape, entry.digest) for entry in manifest.tensors}
        if known != {name: (flat.dtype, flat.shape, tensor_digest(flat.data)) for name, flat in tensors.items()}:
            msg = f"version {version} is published with other bytes; start a new lineage"
            raise VersionTakenError(msg)
        return manifest


async def open_publisher(
    store: ObjectStore,
    *,
    lineage: str,
    dtype: PublishedDtype = "float32",
    anchor_every: int = 16,
    announce: Announce = _tell_nobody,
    difference: Difference = RICE_ULP,
) -> Publisher:
    """Return a publisher for a lineage, new or that of the head.

    A new lineage (see `new_lineage`) is needed for a run that goes on from an older version than the newest published.
    """
    head = await read_head(store)
    published = await load_head(store, head) if head and head.lineage == lineage else None
    return Publisher(
        store,
        lineage=lineage,
        dtype=dtype,
        anchor_every=anchor_every,
        head=head,
        published=published,
        announce=announce,
        difference=difference,
    )
