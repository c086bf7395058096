"""What the newest steps of a run published, for comparison with what was foretold."""

import msgspec

from etude.interfaces import ObjectStore
from etude.types import Head
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.history import kept_routes
from etude.weights.paths import read_manifest


class PublishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A version that differs from the one before it by one optimizer step."""

    version: int
    step: int
    num_bytes: int
    """Of the difference, without its manifest."""


async def newest_steps(store: ObjectStore, head: Head, *, last: int, keys: ChainKeys = WEIGHTS) -> list[PublishedStep]:
    """Return up to `last` of the newest versions of the head's lineage that are kept as differences, in order."""
    kept = await kept_routes(store, head, keys=keys)
    single = [
        route
        for (lineage, version), routes in kept.items()
        for route in routes
        if lineage == head.lineage and route.base == version - 1
    ]
    found: list[PublishedStep] = []
    for route in sorted(single, key=lambda route: route.version)[-last:]:
        manifest = await read_manifest(store, head.lineage, route, keys=keys)
        spans = {(piece.object, piece.offset): piece.length for piece in manifest.pieces}
        found.append(PublishedStep(version=route.version, step=manifest.step, num_bytes=sum(spans.values())))
    return found
