"""What a forecast starts from: a model that will be trained, or a run, with what its newest steps published."""

from pathlib import Path

import msgspec
import numpy as np

from etude.errors import PolicyError
from etude.interfaces import ObjectStore
from etude.weight_types import Head
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.history import kept_routes
from etude.weights.paths import read_manifest
from etude.weights.publisher import PublishedDtype, copies
from etude.weights.shards import find_places
from etude.weights.tensors import FlatTensor, unflatten


class PublishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A version that differs from the one before it by one optimizer step."""

    version: int
    step: int
    num_bytes: int
    """Of the difference, without its manifest."""


def model_tensors(directory: Path, dtype: PublishedDtype) -> dict[str, FlatTensor]:
    """Return the weights of a Hugging Face directory as a run would publish them.

    Raise `PolicyError` when it has none, and `IntegrityError` when its files are damaged.
    """
    places = find_places(directory)
    if not places:
        msg = f"{directory} has no model.safetensors and no index of several; convert the model first"
        raise PolicyError(msg)
    tensors: dict[str, FlatTensor] = {}
    for name, place in places.items():
        data = np.fromfile(directory / place.file, np.uint8, count=place.size, offset=place.at)
        stored = unflatten(FlatTensor(dtype=place.dtype, shape=place.shape, data=data))
        tensors |= copies({name: stored}, dtype)
    return tensors


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
