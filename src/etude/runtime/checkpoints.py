"""What a training stage resumes from: files, then the fact that names them, then the pointer to the newest."""

import hashlib

import msgspec

from etude.config import CheckpointSection
from etude.errors import IntegrityError, ObjectMissingError, StoreError
from etude.interfaces import ErasableStore, ObjectStore
from etude.runtime.journal import Journal, Position
from etude.runtime.run_state import RunState
from etude.telemetry.events import CheckpointDeleted, CheckpointWritten
from etude.training.checkpoint import OPTIMIZER_FILE, POLICY_FILE, STATE_FILE
from etude.training.records import StoredFile

PREFIX = "checkpoints"
POINTER_KEY = f"{PREFIX}/latest.json"
CONTROLLER_FILE = "controller.json"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's half of a checkpoint. There is no state of a random generator: all draws are seeded by place."""

    step: int
    cursor: bytes
    """Of the task source."""
    state: RunState
    position: Position
    """Facts after it come on top of `state`."""
    seconds: float
    """That the stage had taken."""


class _Pointer(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    digest: str
    """Of controller.json."""


def trainer_file_key(step: int, name: str) -> str:
    """Return where a file of a checkpoint lies."""
    return f"{PREFIX}/{step:06d}/{name}"


async def latest_checkpoint(store: ObjectStore) -> Checkpoint | None:
    """Return the controller's half of the newest checkpoint; None when there is none.

    Raises:
        IntegrityError: It is damaged; the ledger alone says then where the run stands.
    """
    try:
        data = await store.get(POINTER_KEY)
    except ObjectMissingError:
        return None
    try:
        pointer = msgspec.json.decode(data, type=_Pointer)
        key = trainer_file_key(pointer.step, CONTROLLER_FILE)
        data = await store.get(key)
        if _digest(data) != pointer.digest:
            raise IntegrityError(f"{key} is not what was written")
        return msgspec.json.decode(data, type=Checkpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, ObjectMissingError) as error:
        raise IntegrityError(f"the newest checkpoint cannot be read: {error}") from error


async def read_trainer_files(store: ObjectStore, step: int) -> dict[str, bytes]:
    """Return the trainer's files of a checkpoint by name."""
    names = (POLICY_FILE, OPTIMIZER_FILE, STATE_FILE)
    return {name: await store.get(trainer_file_key(step, name)) for name in names}


async def write_checkpoint(
    store: ObjectStore, journal: Journal, checkpoint: Checkpoint, trainer_files: dict[str, StoredFile]
) -> None:
    """Complete the checkpoint of a step whose trainer files are stored, and make it the newest."""
    step, state = checkpoint.step, checkpoint.state
    data = msgspec.json.encode(checkpoint)
    files = {**trainer_files, CONTROLLER_FILE: StoredFile(num_bytes=len(data), digest=_digest(data))}
    await store.put(trainer_file_key(step, CONTROLLER_FILE), data)
    journal.record(
        CheckpointWritten(
            step=step,
            version=state.version,
            lineage=state.lineage,
            files={trainer_file_key(step, name): file.digest for name, file in files.items()},
            num_bytes=sum(file.num_bytes for file in files.values()),
        )
    )
    await journal.flush()
    pointer = _Pointer(step=step, digest=files[CONTROLLER_FILE].digest)
    await store.put(POINTER_KEY, msgspec.json.encode(pointer))


async def delete_old_checkpoints(store: ErasableStore, journal: Journal, section: CheckpointSection) -> list[str]:
    """Delete all but the newest checkpoints, as `section` says, and what is left of others.

    Return warnings: a file that stays costs nothing but its place, and is tried again after the next checkpoint.
    """
    kept = journal.state.checkpoints
    room = section.max_bytes
    for age, checkpoint in enumerate(reversed(kept)):
        room -= checkpoint.num_bytes
        if age and (age >= section.keep or room < 0):
            journal.record(CheckpointDeleted(step=checkpoint.step))
    # The fact comes first: a checkpoint of which a part is gone is not resumed from.
    await journal.flush()
    return await delete_files(store, {checkpoint.step for checkpoint in journal.state.checkpoints})


async def delete_files(store: ErasableStore, kept: set[int]) -> list[str]:
    """Delete the files of all checkpoints but those of the steps that are kept; return warnings."""
    warnings: list[str] = []
    try:
        keys = await store.list(PREFIX)
    except StoreError as error:
        return [f"old checkpoints were not deleted: {error}"]
    for key in keys:
        step = key.split("/")[1]
        if step.isdigit() and int(step) not in kept:
            try:
                await store.delete(key)
            except StoreError as error:
                warnings.append(f"{key} was not deleted: {error}")
    return warnings


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
