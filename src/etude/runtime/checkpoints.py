"""What a training stage resumes from: the trainer's files, then the controller's state, then the pointer to both."""

import msgspec

from etude.errors import ObjectMissingError
from etude.interfaces import ObjectStore
from etude.rollout.buffer import BufferState
from etude.training.checkpoint import OPTIMIZER_FILE, POLICY_FILE, STATE_FILE

POINTER_KEY = "checkpoints/latest.json"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's half of a checkpoint."""

    step: int
    cursor: bytes
    """Of the task source."""
    buffer: BufferState
    seconds: float
    """That the stage had taken."""


class _Pointer(msgspec.Struct, frozen=True, kw_only=True):
    step: int


def trainer_file_key(step: int, name: str) -> str:
    """Return where a file of the trainer lies."""
    return f"checkpoints/{step:06d}/{name}"


async def latest_checkpoint(store: ObjectStore) -> Checkpoint | None:
    """Return the newest complete checkpoint."""
    try:
        pointer = msgspec.json.decode(await store.get(POINTER_KEY), type=_Pointer)
    except ObjectMissingError:
        return None
    return msgspec.json.decode(await store.get(trainer_file_key(pointer.step, "controller.json")), type=Checkpoint)


async def read_trainer_files(store: ObjectStore, step: int) -> dict[str, bytes]:
    """Return the trainer's files of a checkpoint by name."""
    names = (POLICY_FILE, OPTIMIZER_FILE, STATE_FILE)
    return {name: await store.get(trainer_file_key(step, name)) for name in names}


async def write_checkpoint(store: ObjectStore, checkpoint: Checkpoint) -> None:
    """Write the controller's state of a step whose trainer files are there, and make it the newest."""
    await store.put(trainer_file_key(checkpoint.step, "controller.json"), msgspec.json.encode(checkpoint))
    await store.put(POINTER_KEY, msgspec.json.encode(_Pointer(step=checkpoint.step)))
