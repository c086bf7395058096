"""The network: a lean forward over Hugging Face weights, fused where that saves time."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from etude.policy.attention import inverse_frequencies, rotary_table, rotate, segment_attention
from etude.policy.experts import dense, mix_experts, route
from etude.policy.layout import hf_views
from etude.policy.shape import PolicyShape

_Passed = tuple[Tensor, Tensor]


class Encoded(NamedTuple):
    """What a forward pass gives."""

    hidden: Float[Tensor, "tokens hidden"]
    """After the final norm: multiply by `Decoder.head` for logits."""
    replaced: Int[Tensor, ""]
    """Replayed expert slots, over all layers, that were given to the router's own choice."""


class Layer(nn.Module):
    """Parameters of one block, and its pass over a packed row."""

    qkv_bias: nn.Parameter | None
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    router: nn.Parameter | None

    def __init__(self, shape: PolicyShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.routed: list[Tensor] | None = None
        """Where to note the experts that each pass really used, i64[tokens, top_k]; None notes nothing."""
        hidden, dim = shape.hidden, shape.head_dim
        rows = (shape.heads + 2 * shape.kv_heads) * dim

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(sizes, dtype=dtype))

        self.input_norm = parameter(hidden)
        self.qkv = parameter(rows, hidden)
        self.qkv_bias = parameter(rows) if shape.attention_bias else None
        self.q_norm = parameter(dim) if shape.qk_norm else None
        self.k_norm = parameter(dim) if shape.qk_norm else None
        self.o = parameter(hidden, shape.heads * dim)
        self.post_norm = parameter(hidden)
        if shape.is_moe:
            self.router = parameter(shape.experts, hidden)
            self.gate_up = parameter(shape.experts, 2 * shape.expert_hidden, hidden)
            self.down = parameter(shape.experts, hidden, shape.expert_hidden)
        else:
            self.router = None
            self.gate_up = parameter(2 * shape.ffn_hidden, hidden)
            self.down = parameter(hidden, shape.ffn_hidden)

    def project(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        cosine: Float[Tensor, "tokens 1 dim"],
        sine: Float[Tensor, "tokens 1 dim"],
    ) -> tuple[
        Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens kv_heads dim"], Float[Tensor, "tokens kv_heads dim"]
    ]:
        """Return queries, keys (both normalised and rotated) and values."""
        shape = self.shape
        normed = F.rms_norm(hidden, (shape.hidden,), self.input_norm, shape.rms_eps)
        heads = F.linear(normed, self.qkv, self.qkv_bias).view(len(hidden), -1, shape.head_dim)
        queries, keys, values = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if self.q_norm is not None:
            queries = F.rms_norm(queries, (shape.head_dim,), self.q_norm, shape.rms_eps)
            keys = F.rms_norm(keys, (shape.head_dim,), self.k_norm, shape.rms_eps)
        return rotate(queries, cosine, sine), rotate(keys, cosine, sine), values

    def feed(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        replay: Int[Tensor, "tokens top_k"] | None,
        plausibility: float,
    ) -> tuple[Float[Tensor, "tokens hidden"], Int[Tensor, ""]]:
        """Return the feed-forward block's contribution, and the replayed slots replaced."""
        shape = self.shape
        normed = F.rms_norm(hidden, (shape.hidden,), self.post_norm, shape.rms_eps)
        if self.router is None:
            return dense(normed, self.gate_up, self.down), torch.zeros((), dtype=torch.int64)
        routes = route(
            F.linear(normed, self.router),
            top_k=shape.experts_per_token,
            norm_topk=shape.norm_topk,
            replay=replay,
            plausibility=plausibility,
        )
        if self.routed is not None:
            self.routed.append(routes.experts.detach())
        return mix_experts(normed, routes, self.gate_up, self.down), routes.replaced

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        cosine: Float[Tensor, "tokens 1 dim"],
        sine: Float[Tensor, "tokens 1 dim"],
        boundaries: Sequence[int],
        replay: Int[Tensor, "tokens top_k"] | None,
        plausibility: float,
    ) -> tuple[Float[Tensor, "tokens hidden"], Int[Tensor, ""]]:
        """Return the block's output over a packed row, and the replayed slots replaced."""
        hidden = self.attend(hidden, cosine, sine, boundaries)
        fed, replaced = self.feed(hidden, replay, plausibility)
        return hidden + fed, replaced

    def attend(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        cosine: Float[Tensor, "tokens 1 dim"],
        sine: Float[Tensor, "tokens 1 dim"],
        boundaries: Sequence[int],
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream after attention within each segment."""
        queries, keys, values = self.project(hidden, cosine, sine)
        attended = segment_attention(queries, keys, values, boundaries)
        return hidden + F.linear(attended.flatten(1), self.o)


class Decoder(nn.Module):
    """A decoder-only language model on packed rows: no batch dimension, no padding.

    Parameters are zero until `load_policy`, `random_policy` or a copy into `hf_tensors` fills them.
    """

    lm_head: nn.Parameter | None

    def __init__(self, shape: PolicyShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shape.check()
        self.shape = shape
        self.embed = nn.Parameter(torch.zeros(shape.vocab_size, shape.hidden, dtype=dtype))
        self.layers = nn.ModuleList(Layer(shape, dtype) for _ in range(shape.layers))
        self.final_norm = nn.Parameter(torch.zeros(shape.hidden, dtype=dtype))
        head = None if shape.tie_embeddings else torch.zeros(shape.vocab_size, shape.hidden, dtype=dtype)
        self.lm_head = None if head is None else nn.Parameter(head)
        self.frequencies: Tensor
        self.register_buffer("frequencies", inverse_frequencies(shape), persistent=False)
        self.checkpoint_activations = False
        """Keep only each block's input and run the block again in the backward pass."""

    @property
    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def head(self) -> Float[Tensor, "vocab hidden"]:
        """Rows of the language-model head, one per token id."""
        return self.embed if self.lm_head is None else self.lm_head

    def rotary(
        self, positions: Int[Tensor, " tokens"]
    ) -> tuple[Float[Tensor, "tokens 1 dim"], Float[Tensor, "tokens 1 dim"]]:
        """Return cosine and sine for these positions, in the parameters' precision."""
        cosine, sine = rotary_table(self.frequencies, positions)
        return cosine.to(self.embed.dtype), sine.to(self.embed.dtype)

    def forward(
        self,
        token_ids: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        boundaries: Sequence[int],
        *,
        replay: Int[Tensor, "tokens layers top_k"] | None = None,
        plausibility: float = 0.5,
    ) -> Encoded:
        """Return hidden states of a packed row.

        Args:
            token_ids: The segments' tokens, one after the other.
            positions: Position of each token in its segment.
            boundaries: Starts of the segments, and the end of the last one.
            replay: Experts that the sampler chose, -1 where unknown; see `route`.
            plausibility: Share of the router's own weakest score that a replayed expert must reach.
        """
        hidden = F.embedding(token_ids, self.embed)
        cosine, sine = self.rotary(positions)
        replaced = torch.zeros((), dtype=torch.int64)
        for index, layer in enumerate(self.blocks):
            routes = None if replay is None else replay[:, index]
            arguments = (hidden, cosine, sine, boundaries, routes, plausibility)
            if self.checkpoint_activations and torch.is_grad_enabled():
                hidden, count = cast("_Passed", checkpoint(layer, *arguments, use_reentrant=False))
            else:
                hidden, count = cast("_Passed", layer(*arguments))
            replaced = replaced + count
        hidden = F.rms_norm(hidden, (self.shape.hidden,), self.final_norm, self.shape.rms_eps)
        return Encoded(hidden, replaced)

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return Hugging Face's tensors by name, as views into the fused parameters.

        Each is contiguous, so that loading, publishing and swapping in place are `view.copy_(new)` under `no_grad`.
        """
        return hf_views(self)
