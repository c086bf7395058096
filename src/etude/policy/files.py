"""Model directories: Hugging Face's `config.json` and safetensors, read and written without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from etude.errors import HostError, PolicyError
from etude.policy.decoder import Decoder
from etude.policy.shape import PolicyShape

_CONFIG_BYTES_MAX = 1 << 20
_INDEX_BYTES_MAX = 64 << 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load_policy(directory: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return the decoder stored in a Hugging Face model directory, its weights cast to `dtype`.

    Raises:
        PolicyError: Something is missing, damaged, of another shape than `config.json` says, or not supported.
    """
    root = Path(directory)
    decoder = Decoder(load_shape(root), dtype)
    missing = decoder.hf_tensors()
    for path in _weight_files(root):
        try:
            with safe_open(path, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
                for name in cast("list[str]", opened.keys()):  # pyright: ignore[reportUnknownMemberType]
                    if name == "lm_head.weight" and decoder.lm_head is None:
                        continue
                    stored = cast("Tensor", opened.get_tensor(name))  # pyright: ignore[reportUnknownMemberType]
                    _fill(missing, name, stored, path)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"{path}: not a readable safetensors file ({error}); copy the model again") from error
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise PolicyError(f"{root}: {len(missing)} tensors are missing, such as {some}; copy the model again")
    return decoder


def load_shape(directory: str | Path) -> PolicyShape:
    """Return the shape of a model directory. Raise `PolicyError` when there is none or it is not supported."""
    path = Path(directory) / "config.json"
    config = _read_json(path, _CONFIG_BYTES_MAX)
    return PolicyShape.from_hf(config)


def save_policy(
    decoder: Decoder,
    directory: str | Path,
    files: Mapping[str, bytes] | None = None,
    *,
    shard_bytes: int = 2 << 30,
) -> None:
    """Write a directory that `load_policy` and `transformers.AutoModelForCausalLM` read.

    `files` are further files by plain name, such as `tokenizer.json`. Weights beyond `shard_bytes` are split. Raises
    `HostError` when the disk refuses.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    config = decoder.shape.to_hf() | {"dtype": str(decoder.embed.dtype).removeprefix("torch.")}
    shards = _shards(decoder.hf_tensors(), shard_bytes)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        try:
            save_file(shard, root / name, metadata={"format": "pt"})
        except SafetensorError as error:
            msg = f"{root / name} cannot be written ({error}): free some space and run the same command again"
            raise HostError(msg) from error
        index |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (root / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    for name, data in (files or {}).items():
        if Path(name).name != name:
            raise PolicyError(f"{name!r} is not a plain file name for a model directory")
        (root / name).write_bytes(data)
    (root / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def random_policy(shape: PolicyShape, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return an untrained decoder; the same shape and seed give the same weights."""
    decoder = Decoder(shape, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in decoder.hf_tensors().items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            elif name.endswith(".bias"):
                tensor.zero_()
            else:
                # Blocks add to the residual stream twice per layer: damp them so that depth does not grow it.
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)
    return decoder


def _read_json(path: Path, max_bytes: int) -> dict[str, object]:
    try:
        if path.stat().st_size > max_bytes:
            raise PolicyError(f"{path}: larger than {max_bytes} bytes, so not what its name says")
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise PolicyError(
            f"{path}: cannot be read ({error.strerror}); is this a Hugging Face model directory?"
        ) from error
    except ValueError as error:
        raise PolicyError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise PolicyError(f"{path}: expected a JSON object")
    return cast("dict[str, object]", content)


def _weight_files(root: Path) -> list[Path]:
    single = root / "model.safetensors"
    if single.is_file():
        return [single]
    index = root / "model.safetensors.index.json"
    if not index.is_file():
        raise PolicyError(f"{root}: neither model.safetensors nor its index is there; pickled weights are not read")
    table = _read_json(index, _INDEX_BYTES_MAX).get("weight_map")
    names = sorted({str(name) for name in cast("dict[str, object]", table).values()}) if isinstance(table, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise PolicyError(f"{index}: weight_map must name files of the same directory")
    return [root / name for name in names]


def _fill(missing: dict[str, Tensor], name: str, stored: Tensor, path: Path) -> None:
    target = missing.pop(name, None)
    if target is None:
        raise PolicyError(f"{path}: tensor {name} is unknown or appears twice for this config.json")
    if stored.shape != target.shape or stored.dtype not in _FLOATS:
        found = f"{stored.dtype} {tuple(stored.shape)}"
        raise PolicyError(f"{path}: tensor {name} is {found}, config.json asks for floats of {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(stored)


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        # safetensors refuses tensors that share storage, as slices of a fused parameter do.
        shards[-1][name] = tensor.clone()
        size += tensor.nbytes
    return shards
