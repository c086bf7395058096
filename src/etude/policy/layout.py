"""Hugging Face's on-disk names for views into the fused parameters."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from etude.policy.decoder import Decoder, Layer


def hf_views(decoder: "Decoder") -> dict[str, Tensor]:
    """Return every tensor of the model directory by name, detached, sharing memory with the decoder."""
    views = {"model.embed_tokens.weight": decoder.embed}
    for index, layer in enumerate(decoder.blocks):
        prefix = f"model.layers.{index}."
        views |= {prefix + name: tensor for name, tensor in _layer_views(layer).items()}
    views["model.norm.weight"] = decoder.final_norm
    if decoder.lm_head is not None:
        views["lm_head.weight"] = decoder.lm_head
    return {name: tensor.detach() for name, tensor in views.items()}


def _layer_views(layer: "Layer") -> dict[str, Tensor]:
    views: dict[str, Tensor] = {"input_layernorm.weight": layer.input_norm}
    views |= _attention_views(layer)
    views["post_attention_layernorm.weight"] = layer.post_norm
    if layer.router is None:
        return views | _block_views("mlp.", layer.gate_up, layer.down)
    views["mlp.gate.weight"] = layer.router
    for expert in range(layer.shape.experts):
        views |= _block_views(f"mlp.experts.{expert}.", layer.gate_up[expert], layer.down[expert])
    return views


def _attention_views(layer: "Layer") -> dict[str, Tensor]:
    shape = layer.shape
    rows = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
    names = ("q_proj", "k_proj", "v_proj")
    views = {f"self_attn.{name}.weight": part for name, part in zip(names, torch.split(layer.qkv, rows), strict=True)}
    if layer.qkv_bias is not None:
        parts = torch.split(layer.qkv_bias, rows)
        views |= {f"self_attn.{name}.bias": part for name, part in zip(names, parts, strict=True)}
    views["self_attn.o_proj.weight"] = layer.o
    if layer.q_norm is not None and layer.k_norm is not None:
        views |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    return views


def _block_views(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    return {
        f"{prefix}gate_proj.weight": gate,
        f"{prefix}up_proj.weight": up,
        f"{prefix}down_proj.weight": down,
    }
