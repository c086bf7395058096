"""Whether the chain of a view is made of what the policy's chain has."""

import asyncio
from typing import cast, get_args

from etude.interfaces import ObjectStore
from etude.policy.views import View, in_view
from etude.weight_types import Manifest, TensorEntry
from etude.weights.chain import WEIGHTS, ChainKeys
from etude.weights.digest import tensor_digest, version_digest
from etude.weights.history import kept_routes
from etude.weights.reader import LoadedVersion, load_version, read_head
from etude.weights.tensors import flatten, unflatten

_VIEWS = "views/"


async def origin_problem(store: ObjectStore, manifest: Manifest, *, keys: ChainKeys) -> str:
    """Return in what a version of a view is not the view of the version that it claims; empty when it is.

    A version that the policy's chain does not keep any more is not compared with anything. Raise as `load_version`.
    """
    view = keys.root.removeprefix(_VIEWS)
    if not keys.root.startswith(_VIEWS) or view not in get_args(View):
        return ""
    head = await read_head(store, keys=WEIGHTS)
    if head is None or (manifest.lineage, manifest.version) not in await kept_routes(store, head):
        return ""
    policy = await load_version(store, lineage=manifest.lineage, version=manifest.version)
    if policy.digest != manifest.source:
        return f"it claims to be a view of {manifest.source[:16]}, but that version is {policy.digest[:16]}"
    made = await asyncio.to_thread(_digest_in_view, policy, cast("View", view))
    return "" if made == manifest.digest else f"it is not what the view {view} makes of that version"


def _digest_in_view(policy: LoadedVersion, view: View) -> str:
    tensors = {name: unflatten(flat) for name, flat in policy.tensors.items()}
    flats = ((name, flatten(tensor)) for name, tensor in in_view(tensors, view).items())
    return version_digest(
        TensorEntry(name=name, dtype=flat.dtype, shape=flat.shape, digest=tensor_digest(flat.data, flat.dtype))
        for name, flat in flats
    )
