"""Keys and values: one slot per running request, and what finished requests leave for their session's next one."""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from etude.policy.shape import PolicyShape

_BRANCHES = 4


class SlotCache:
    """Preallocated keys, values and routes. Running requests fill slots 0, 1, ... without a hole.

    Memory starts as zeros: a masked position's value is multiplied by a probability of zero, which would keep a NaN.
    """

    def __init__(
        self, shape: PolicyShape, *, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv = torch.zeros(
            (shape.layers, 2, slots, shape.kv_heads, context, shape.head_dim), dtype=dtype, device=device
        )
        routed = (slots, context, shape.layers, shape.experts_per_token)
        self.routes = torch.zeros(routed, dtype=torch.int16, device=device) if shape.is_moe else None
        self._heads = torch.arange(shape.kv_heads, device=device)

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where each token's heads go, as rows of a layer's keys or values seen as [slots * heads * context]."""
        heads, context = self.kv.shape[3], self.kv.shape[4]
        return ((slots[:, None] * heads + self._heads) * context + positions[:, None]).flatten()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]
        if self.routes is not None:
            self.routes[target, :length] = self.routes[source, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot whose numbers went bad."""
        self.kv[:, :, slot].zero_()


class Parked(NamedTuple):
    """Keys and values of exactly these tokens, computed under one set of weights."""

    salt: int
    token_ids: tuple[int, ...]
    kv: Tensor
    """[layers, 2, kv_heads, len(token_ids), head_dim]."""


class PrefixCache:
    """Finished requests' keys and values, by session; the least recently used sessions leave first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[str, list[Parked]] = OrderedDict()
        self.num_bytes = 0

    def store(self, session_id: str, parked: Parked) -> None:
        """Keep an entry; a session holds up to four, so that a branch or a retry finds its parent."""
        if parked.kv.nbytes > self._max_bytes:
            return
        entries = self._sessions.setdefault(session_id, [])
        self._sessions.move_to_end(session_id)
        entries.append(parked)
        self.num_bytes += parked.kv.nbytes
        if len(entries) > _BRANCHES:
            self.num_bytes -= entries.pop(0).kv.nbytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._sessions.popitem(last=False)
            self.num_bytes -= sum(entry.kv.nbytes for entry in dropped)

    def find(self, session_id: str, salt: int, prompt_ids: tuple[int, ...]) -> Parked | None:
        """Return the longest entry of the session, computed under this salt, that the prompt extends."""
        entries = self._sessions.get(session_id, [])
        fitting = [
            entry
            for entry in entries
            if entry.salt == salt
            and len(entry.token_ids) < len(prompt_ids)
            and prompt_ids[: len(entry.token_ids)] == entry.token_ids
        ]
        if not fitting:
            return None
        self._sessions.move_to_end(session_id)
        return max(fitting, key=lambda entry: len(entry.token_ids))

    def clear(self) -> None:
        """Forget everything."""
        self._sessions.clear()
        self.num_bytes = 0
