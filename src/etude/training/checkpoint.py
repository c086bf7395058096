"""What a trainer resumes from: safetensors and JSON, as files by name."""

import hashlib
from collections.abc import Mapping

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from etude.errors import IntegrityError, RunError, StoreError
from etude.training.trainer import Trainer

POLICY_FILE = "policy.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer.json"


class _State(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    version: int
    format: int = 1


def checkpoint(trainer: Trainer) -> dict[str, bytes]:
    """Return the files that `restore` continues from, bit for bit.

    Raises:
        RunError: Gradients of a step under way would be lost: checkpoint right after an optimizer step.
    """
    status = trainer.status()
    if status.pending_groups:
        raise RunError(f"{status.pending_groups} groups are in the step under way; checkpoint after the optimizer step")
    return {
        POLICY_FILE: save({name: tensor.contiguous() for name, tensor in trainer.tensors().items()}),
        OPTIMIZER_FILE: save(trainer.optimizer.state()),
        STATE_FILE: msgspec.json.encode(_State(step=trainer.step, version=trainer.version)),
    }


def digest_of(data: bytes) -> str:
    """Return the sha256 by which a file is known again."""
    return hashlib.sha256(data).hexdigest()


def check_files(files: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
    """Raise `IntegrityError` unless the files are those that were written."""
    for name, digest in digests.items():
        if name not in files or digest_of(files[name]) != digest:
            raise IntegrityError(f"the checkpoint's {name} is not what was written; resume from an older one")


def restore(trainer: Trainer, files: Mapping[str, bytes]) -> None:
    """Take over a checkpoint's weights, optimizer state, step and version; a step under way is forgotten.

    Raises:
        StoreError: A file is missing, damaged, or of another network; the trainer must not be used then.
    """
    policy, moments = _tensors(files, POLICY_FILE), _tensors(files, OPTIMIZER_FILE)
    try:
        state = msgspec.json.decode(files[STATE_FILE], type=_State)
    except (KeyError, msgspec.MsgspecError) as error:
        raise StoreError(f"the checkpoint's {STATE_FILE} is missing or damaged; resume from an older one") from error
    targets = trainer.tensors()
    if {name: tensor.shape for name, tensor in targets.items()} != {name: t.shape for name, t in policy.items()}:
        raise StoreError(f"the checkpoint's {POLICY_FILE} holds another network than the policy; is it another run's?")
    trainer.discard()
    trainer.optimizer.restore(moments)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(policy[name])
    trainer.step, trainer.version = state.step, state.version


def _tensors(files: Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    try:
        return load(files[name])
    except (KeyError, SafetensorError) as error:
        raise StoreError(f"the checkpoint's {name} is missing or damaged; resume from an older one") from error
