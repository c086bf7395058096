"""Tasks in a seeded order, each once per epoch, with a cursor that says where the source stands."""

import hashlib
from collections.abc import Sequence

import msgspec

from etude.errors import EndOfTasksError, TaskError
from etude.types import Task

MAX_CURSOR_BYTES = 4096


class Cursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `SeededTaskSource.cursor` writes as JSON."""

    format: int
    tasks: str
    """Digest of the tasks that the source was made over."""
    seed: int
    epoch: int
    position: int
    """Tasks of the epoch that were given out already."""


class SeededTaskSource:
    """A `TaskSource` over a fixed set of tasks; each epoch has its own order, which depends on seed and tasks alone."""

    def __init__(self, tasks: Sequence[Task], seed: int, epochs: int | None = None) -> None:
        """Start before the first task of epoch 0.

        Args:
            tasks: In any order; each `task_id` once.
            seed: Of all orders.
            epochs: How often each task is given out; None has no end.

        Raises:
            TaskError: When there are no tasks, or two have the same id.
        """
        self._tasks = {task.task_id: task for task in tasks}
        if not tasks or len(self._tasks) != len(tasks):
            raise TaskError(
                f"{len(tasks)} tasks with {len(self._tasks)} ids; at least one is needed, each with its own id"
            )
        self._digest = _digest(self._tasks)
        self._seed = seed
        self._epochs = epochs
        self._epoch = 0
        self._position = 0
        self._order: list[str] = self._order_of(0)

    def next_task(self) -> Task:
        """Return the next task.

        Raises:
            EndOfTasksError: After the last epoch.
        """
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        if self._epochs is not None and self._epoch >= self._epochs:
            raise EndOfTasksError(f"all {len(self._tasks)} tasks were given out {self._epochs} times")
        task = self._tasks[self._order[self._position]]
        self._position += 1
        return task

    def cursor(self) -> bytes:
        """Return where the source stands, as a small JSON object."""
        return msgspec.json.encode(
            Cursor(format=1, tasks=self._digest, seed=self._seed, epoch=self._epoch, position=self._position)
        )

    def restore(self, cursor: bytes) -> None:
        """Continue where another source over the same tasks and seed stood.

        Raises:
            TaskError: When the cursor is damaged, or belongs to other tasks or another seed.
        """
        if len(cursor) > MAX_CURSOR_BYTES:
            raise TaskError(f"task cursor: {len(cursor)} bytes are too many; the checkpoint is damaged")
        try:
            stood = msgspec.json.decode(cursor, type=Cursor)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TaskError(f"task cursor: {error}; the checkpoint is damaged") from error
        if stood.format != 1 or stood.epoch < 0 or not 0 <= stood.position <= len(self._order):
            raise TaskError(
                "task cursor: not one that this version of etude writes; resume with the version that wrote it"
            )
        if stood.tasks != self._digest:
            raise TaskError(
                "task cursor: the tasks are not those of the checkpoint; bring the task directory back to what it was, "
                "or start a new run"
            )
        if stood.seed != self._seed:
            raise TaskError(
                f"task cursor: written with seed {stood.seed}, not {self._seed}; set run.seed = {stood.seed}"
            )
        self._epoch, self._position = stood.epoch, stood.position
        self._order = self._order_of(stood.epoch)

    def _order_of(self, epoch: int) -> list[str]:
        # Sorting by a hash and not `random.shuffle`: the order must survive a change of the Python version.
        return sorted(
            self._tasks, key=lambda task_id: hashlib.sha256(f"{self._seed}/{epoch}/{task_id}".encode()).digest()
        )


def _digest(tasks: dict[str, Task]) -> str:
    return hashlib.sha256(
        msgspec.json.encode(sorted((task_id, task.digest) for task_id, task in tasks.items()))
    ).hexdigest()
