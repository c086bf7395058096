# pyright: basic, reportOptionalMemberAccess=false
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import PolicyError
from etude.policy.files import load_policy, random_policy, save_policy
from etude.policy.shape import PolicyShape

SHAPE = PolicyShape(
    model_type="llama", vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn_hidden=24
)


@pytest.fixture
def saved(tmp_path):
    save_policy(random_policy(SHAPE, seed=0), tmp_path, {"tokenizer.json": b"{}"})
    return tmp_path


def test_what_was_saved_is_loaded_bit_for_bit(saved):
    ours, again = random_policy(SHAPE, seed=0), load_policy(saved)
    assert again.shape == SHAPE
    for name, tensor in ours.hf_tensors().items():
        assert torch.equal(tensor, again.hf_tensors()[name])
    assert (saved / "tokenizer.json").read_bytes() == b"{}"
    assert load_policy(saved, torch.bfloat16).embed.dtype is torch.bfloat16


def test_large_policies_are_split_and_read_back(tmp_path):
    save_policy(random_policy(SHAPE, seed=0), tmp_path, shard_bytes=4096)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_policy(tmp_path).hf_tensors()
    for name, tensor in random_policy(SHAPE, seed=0).hf_tensors().items():
        assert torch.equal(tensor, loaded[name])


def test_views_write_through_to_the_network():
    decoder = random_policy(SHAPE, seed=0)
    other = random_policy(SHAPE, seed=1).hf_tensors()
    for name, view in decoder.hf_tensors().items():
        assert view.is_contiguous()
        view.copy_(other[name])
    for parameter, wanted in zip(decoder.parameters(), random_policy(SHAPE, seed=1).parameters(), strict=True):
        assert torch.equal(parameter, wanted)


def corrupt(root, change):
    tensors = load_file(root / "model.safetensors")
    change(tensors)
    save_file(tensors, root / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.update({"extra": torch.zeros(1)}), "extra is unknown"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "config.json asks for"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(16, dtype=torch.int32)}), "asks for floats"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(saved, change, message):
    corrupt(saved, change)
    with pytest.raises(PolicyError, match=message):
        load_policy(saved)


def test_broken_directories_are_refused_with_what_to_do(saved, tmp_path):
    with pytest.raises(PolicyError, match="model directory"):
        load_policy(tmp_path / "nowhere")
    (saved / "model.safetensors").write_bytes(b"no")
    with pytest.raises(PolicyError, match="copy the model again"):
        load_policy(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match="pickled weights are not read"):
        load_policy(saved)
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PolicyError, match="same directory"):
        load_policy(saved)
    with pytest.raises(PolicyError, match="plain file name"):
        save_policy(random_policy(SHAPE, seed=0), saved, {"../evil": b""})


OLD = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "rope_theta": 100000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_scaling": None, "hidden_act": "silu",
    "eos_token_id": 2,
}  # fmt: skip


def test_configs_of_older_transformers_are_read():
    shape = PolicyShape.from_hf(OLD)
    assert (shape.rope_theta, shape.head_dim, shape.eos_token_ids) == (100000.0, 64, (2,))
    assert PolicyShape.from_hf(shape.to_hf()) == shape
    stretched = OLD | {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }  # fmt: skip
    shape = PolicyShape.from_hf(stretched)
    assert (shape.rope_scaling.factor, shape.rope_theta) == (8.0, 100000.0)
    assert PolicyShape.from_hf(shape.to_hf()) == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "supported are llama"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_attention_heads": 8}, "fit each other"),
        ({"hidden_size": None}, "hidden_size"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_would_compute_another_function_is_refused(change, message):
    with pytest.raises(PolicyError, match=message):
        PolicyShape.from_hf(OLD | change)


def test_a_sliding_window_bounds_the_context():
    assert PolicyShape.from_hf(OLD | {"model_type": "mistral", "sliding_window": 4096}).max_context == 4096
