"""What a process really holds of a policy, as one digest."""

import hashlib
from collections.abc import Mapping

import msgspec
import torch
import xxhash
from torch import Tensor

from etude.policy.device_hash import device_sums
from etude.policy.sum_hash import sums_of
from etude.policy.views import View, in_view

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_KNOWN: dict[tuple[int, bytes], str] = {}
"""Sum hashes by width and xxh3-128 of the bytes."""
_MOST_KNOWN = 1 << 16


def held_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 over all tensors' names, dtypes, shapes and the sum hash of their bytes.

    For weights in the published dtype it is the digest of their version's manifest.
    """
    facts = [
        (name, _NAMES[tensor.dtype], tuple(tensor.shape), _bytes_digest(tensor)) for name, tensor in tensors.items()
    ]
    return hashlib.sha256(msgspec.json.encode(sorted(facts))).hexdigest()


def view_digest(tensors: Mapping[str, Tensor], view: View) -> str:
    """Return what `held_digest` of an engine must be that holds these published weights in a view."""
    return held_digest(in_view(tensors, view))


def _bytes_digest(tensor: Tensor) -> str:
    """A swap waits for this: weights that were hashed when they were staged are only recognised, at memory speed.

    A device hashes faster than what lies on it can be fetched.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = tensor.element_size()
    if flat.device.type != "cpu":
        return device_sums(flat, width=width).hex()
    data = flat.numpy()
    fingerprint = (width, xxhash.xxh3_128_digest(data.data))
    found = _KNOWN.get(fingerprint)
    if found is None:
        found = sums_of(data, width=width).hex()
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[fingerprint] = found
    return found
