"""The decoder's forward pass with cached keys and values: many prompts packed, or one new token per row.

Computes what `Decoder.forward` computes, in as few operations as we found: at small sizes the count of operations
bounds the speed, so norms and rotations treat queries and keys together, and residual sums ride on the products.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.policy.decoder import Decoder, Layer
from etude.sampling.engines.torch_cache import SlotCache

_LENGTH_STEP = 32


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one request."""

    slot: int
    start: int
    """Position of the first of them; everything before it is in the slot already."""
    token_ids: Sequence[int]


class Rotation(NamedTuple):
    """Rotary factors per token, broadcast over heads; the sine's first half is negated for use with a roll."""

    cosine: Tensor
    sine: Tensor


class CachedForward:
    """Runs a decoder over a slot cache."""

    def __init__(self, decoder: Decoder, cache: SlotCache) -> None:
        self._decoder = decoder
        self._shape = decoder.shape
        self._cache = cache
        self._device = decoder.embed.device
        context = cache.kv.shape[4]
        cosine, sine = decoder.rotary(torch.arange(context, device=self._device))
        half = self._shape.head_dim // 2
        self._rotary = Rotation(cosine, torch.cat((-sine[..., :half], sine[..., half:]), dim=-1))
        self._positions = torch.arange(context, device=self._device)
        self._qk_norms: list[Tensor | None] = []
        self.use(decoder)

    def use(self, decoder: Decoder) -> None:
        """Multiply with the weights of another decoder of the same shape from now on, which then stay as they are."""
        self._decoder = decoder
        shape = self._shape
        self._qk_norms = [
            None
            if layer.q_norm is None or layer.k_norm is None
            else torch.cat((layer.q_norm.expand(shape.heads, -1), layer.k_norm.expand(shape.kv_heads, -1)))
            for layer in self._decoder.blocks
        ]

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Feed one token to each of the slots 0 to n - 1 and return f32[n, vocab] logits of what follows.

        Args:
            tokens: i64[n].
            positions: i64[n], of these tokens; the slot holds all before it.
            longest: The highest of the positions.
        """
        rows, heads = len(tokens), self._shape.kv_heads
        length = min(-(-(longest + 1) // _LENGTH_STEP) * _LENGTH_STEP, self._cache.kv.shape[4])
        slots = self._positions[:rows] if rows <= len(self._positions) else torch.arange(rows, device=self._device)
        places = self._cache.places(slots, positions)
        hidden = F.embedding(tokens, self._decoder.embed)
        mask = torch.zeros((rows, length), dtype=hidden.dtype, device=self._device)
        mask.masked_fill_(self._positions[:length] > positions[:, None], -torch.inf)
        mask = mask[:, None].expand(-1, heads, -1).reshape(rows * heads, 1, length)
        rotation = Rotation(*(table.index_select(0, positions) for table in self._rotary))
        routes: list[Tensor] = []
        for index, layer in enumerate(self._decoder.blocks):
            queries, keys, values = self._project(index, layer, hidden, rotation)
            self._write(index, places, keys, values)
            attended = self._attend(index, queries, mask, length)
            hidden = self._feed(layer, torch.addmm(hidden, attended, layer.o.t()), routes)
        if routes and self._cache.routes is not None:
            chosen = torch.stack(routes, dim=1).sort(dim=2).values.to(torch.int16)
            self._cache.routes[slots, positions] = chosen
        hidden = F.rms_norm(hidden, (self._shape.hidden,), self._decoder.final_norm, self._shape.rms_eps)
        return F.linear(hidden, self._decoder.head).float()

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute keys, values and routes of prompt tokens, packed without padding."""
        tokens = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=self._device)
        lengths = [len(chunk.token_ids) for chunk in chunks]
        slots = torch.tensor([c.slot for c in chunks], device=self._device).repeat_interleave(
            torch.tensor(lengths, device=self._device)
        )
        positions = torch.cat([self._positions[c.start : c.start + len(c.token_ids)] for c in chunks])
        places = self._cache.places(slots, positions)
        hidden = F.embedding(tokens, self._decoder.embed)
        rotation = Rotation(*(table.index_select(0, positions) for table in self._rotary))
        masks = [self._chunk_mask(chunk) for chunk in chunks]
        routes: list[Tensor] = []
        for index, layer in enumerate(self._decoder.blocks):
            queries, keys, values = self._project(index, layer, hidden, rotation)
            self._write(index, places, keys, values)
            parts = [
                self._attend_chunk(index, part, chunk, mask)
                for part, chunk, mask in zip(torch.split(queries, lengths), chunks, masks, strict=True)
            ]
            attended = torch.cat(parts).flatten(1)
            hidden = self._feed(layer, torch.addmm(hidden, attended, layer.o.t()), routes)
        if routes and self._cache.routes is not None:
            chosen = torch.stack(routes, dim=1).sort(dim=2).values.to(torch.int16)
            self._cache.routes[slots, positions] = chosen

    def _project(self, index: int, layer: Layer, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._shape
        normed = F.rms_norm(hidden, (shape.hidden,), layer.input_norm, shape.rms_eps)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, shape.head_dim)
        mixed = heads[:, : shape.heads + shape.kv_heads]
        weights = self._qk_norms[index]
        if weights is not None:
            mixed = F.rms_norm(mixed, (shape.head_dim,), None, shape.rms_eps) * weights
        rotated = torch.addcmul(mixed * rotation.cosine, mixed.roll(shape.head_dim // 2, -1), rotation.sine)
        return rotated[:, : shape.heads], rotated[:, shape.heads :], heads[:, shape.heads + shape.kv_heads :]

    def _write(self, index: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        dim = self._shape.head_dim
        stored_keys, stored_values = self._cache.kv[index].view(2, -1, dim).unbind()
        stored_keys.index_copy_(0, places, keys.reshape(-1, dim))
        stored_values.index_copy_(0, places, values.reshape(-1, dim))

    def _attend(self, index: int, queries: Tensor, mask: Tensor, length: int) -> Tensor:
        """One query per row: each group of query heads is the row dimension of a product with its shared keys."""
        rows, heads, dim = queries.shape
        kv_heads = self._shape.kv_heads
        keys, values = (part[:rows, :, :length].flatten(0, 1) for part in self._cache.kv[index].unbind())
        grouped = queries.reshape(rows * kv_heads, heads // kv_heads, dim)
        scores = torch.baddbmm(mask, grouped, keys.transpose(1, 2), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(dim=-1), values).view(rows, heads * dim)

    def _attend_chunk(self, index: int, queries: Tensor, chunk: Chunk, mask: Tensor | None) -> Tensor:
        end = chunk.start + len(chunk.token_ids)
        keys, values = (part[chunk.slot, None, :, :end] for part in self._cache.kv[index].unbind())
        grouped = self._shape.heads != self._shape.kv_heads
        query = queries.transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return attended[0].transpose(0, 1)

    def _chunk_mask(self, chunk: Chunk) -> Tensor | None:
        if chunk.start == 0:
            return None
        end = chunk.start + len(chunk.token_ids)
        return self._positions[:end] <= self._positions[chunk.start : end, None]

    def _feed(self, layer: Layer, hidden: Tensor, routes: list[Tensor]) -> Tensor:
        shape = self._shape
        normed = F.rms_norm(hidden, (shape.hidden,), layer.post_norm, shape.rms_eps)
        if layer.router is None:
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            return torch.addmm(hidden, F.silu(gate).mul_(up), layer.down.t())
        logits = F.linear(normed, layer.router).float()
        if shape.norm_topk:
            best, experts = torch.topk(logits, shape.experts_per_token)
            gates = best.softmax(dim=-1)
        else:
            gates, experts = torch.topk(logits.softmax(dim=-1), shape.experts_per_token)
        routes.append(experts)
        return self._mix_experts(layer, hidden, normed, experts.flatten(), gates.to(hidden.dtype).flatten())

    def _mix_experts(self, layer: Layer, hidden: Tensor, normed: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Add to `hidden` the gated outputs of each token's experts, one product per expert that anyone chose."""
        order = experts.argsort()
        tokens = order.div(self._shape.experts_per_token, rounding_mode="floor")
        counts = cast("list[int]", torch.bincount(experts, minlength=self._shape.experts).tolist())  # pyright: ignore[reportUnknownMemberType]
        inputs = torch.split(normed.index_select(0, tokens), counts)
        wide = torch.cat(
            [part @ weight.t() for part, weight, n in zip(inputs, layer.gate_up, counts, strict=True) if n]
        )
        gate, up = wide.chunk(2, dim=-1)
        inner = torch.split(F.silu(gate).mul_(up), counts)
        narrow = torch.cat([part @ weight.t() for part, weight, n in zip(inner, layer.down, counts, strict=True) if n])
        return hidden.index_add_(0, tokens, narrow.mul_(gates.index_select(0, order)[:, None]))
