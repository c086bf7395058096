"""The sizes and switches of a network, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from typing import cast

import msgspec

from etude.errors import PolicyError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Supported `model_type`s, and the transformers class that reads the same directory."""

_QWEN3_HEAD_DIM = 128


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3's stretching of the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class PolicyShape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a decoder that is not a weight."""

    model_type: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    """Inner size of a dense layer; 0 when the layers hold experts."""
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_hidden: int = 0
    norm_topk: bool = False
    """The gates of the chosen experts are scaled to sum to one."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    """The language-model head is the embedding."""
    qk_norm: bool = False
    attention_bias: bool = False
    """Queries, keys and values have a bias."""
    max_context: int = 2048
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Layers hold experts instead of one dense block."""
        return self.experts > 0

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> "PolicyShape":
        """Read the dictionary of a `config.json`, in the spelling of transformers 4 or 5.

        Raises:
            PolicyError: The architecture, or a switch of it, is not supported; the message names what is.
        """
        model_type = str(config.get("model_type", ""))
        if model_type not in ARCHITECTURES:
            msg = f"model_type {model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
            raise PolicyError(msg)
        _refuse_switches(config, model_type)
        moe = model_type == "qwen3_moe"
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        theta, scaling = _rope(config)
        shape = cls(
            model_type=model_type,
            vocab_size=_integer(config, "vocab_size"),
            hidden=hidden,
            layers=_integer(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", _QWEN3_HEAD_DIM if model_type == "qwen3" else hidden // heads),
            ffn_hidden=0 if moe else _integer(config, "intermediate_size"),
            experts=_integer(config, "num_local_experts", _integer(config, "num_experts", 128)) if moe else 0,
            experts_per_token=_integer(config, "num_experts_per_tok", 8) if moe else 0,
            expert_hidden=_integer(config, "moe_intermediate_size", 768) if moe else 0,
            norm_topk=bool(config.get("norm_topk_prob", False)) if moe else False,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=model_type.startswith("qwen3"),
            attention_bias=model_type == "qwen2",
            max_context=_context(config),
            eos_token_ids=_eos(config),
        )
        shape.check()
        return shape

    def check(self) -> None:
        """Raise `PolicyError` when the sizes do not fit each other."""
        sizes = (self.vocab_size, self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.max_context)
        if min(sizes) < 1 or self.heads % self.kv_heads or self.head_dim % 2:
            msg = f"the policy's sizes do not fit each other (heads a multiple of kv_heads, even head_dim): {self}"
            raise PolicyError(msg)
        if self.is_moe and not (1 <= self.experts_per_token <= self.experts and self.expert_hidden > 0):
            msg = f"experts_per_token ({self.experts_per_token}) must lie between 1 and experts ({self.experts})"
            raise PolicyError(msg)
        if not self.is_moe and self.ffn_hidden < 1:
            raise PolicyError("a dense policy needs ffn_hidden (intermediate_size) of at least 1")

    def to_hf(self) -> dict[str, object]:
        """Return the `config.json` with which transformers builds the same network."""
        rope: dict[str, object] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_context,
            }
        config: dict[str, object] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_hidden or self.expert_hidden,
            "rope_parameters": rope,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_context,
            "hidden_act": "silu",
            "sliding_window": None,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if self.is_moe:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_hidden,
                "norm_topk_prob": self.norm_topk,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return config


def _refuse_switches(config: Mapping[str, object], model_type: str) -> None:
    """Refuse what would silently compute another function than the one the weights were trained for."""
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "attention_bias": (False,) if model_type != "qwen2" else (True, False),
        "use_sliding_window": (False,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1,),
    }
    for key, allowed in wanted.items():
        if key in config and config[key] not in allowed:
            msg = f"config.json: {key} = {config[key]!r} is not supported for {model_type}; expected {allowed[0]!r}"
            raise PolicyError(msg)


def _rope(config: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """Read the rotary settings: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` before it."""
    raw: object = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise PolicyError("config.json: rope_parameters must be a table")
    rope = cast("dict[str, object]", raw)
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if _number(rope, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise PolicyError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        msg = f"config.json: rope_type {kind!r} is not supported; supported are default, llama3"
        raise PolicyError(msg)
    return theta, RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_context=_integer(rope, "original_max_position_embeddings"),
    )


def _context(config: Mapping[str, object]) -> int:
    context = _integer(config, "max_position_embeddings", 2048)
    window = config.get("sliding_window")
    # Within its window, sliding attention is full attention; beyond it we do not compute the same function.
    if config.get("model_type") == "mistral" and isinstance(window, int):
        return min(context, window)
    return context


def _eos(config: Mapping[str, object]) -> tuple[int, ...]:
    raw = config.get("eos_token_id")
    ids = cast("list[object]", raw) if isinstance(raw, list) else [raw]
    return tuple(token for token in ids if isinstance(token, int))


def _integer(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int):
        msg = f"config.json: {key} must be a whole number, got {value!r}"
        raise PolicyError(msg)
    return value


def _number(config: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float):
        msg = f"config.json: {key} must be a number, got {value!r}"
        raise PolicyError(msg)
    return float(value)
