"""The training and held-out tasks of a run: read from directories, or generated into the run's local directory."""

import shutil
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.runtime.families import family_of
from etude.tasks.harbor import load_tasks
from etude.types import Task


class TaskSets(NamedTuple):
    """Tasks by purpose; no task is in both."""

    train: list[Task]
    heldout: list[Task]


def task_sets(config: RunConfig, local: Path) -> TaskSets:
    """Return the run's tasks.

    Raises:
        ConfigError: No tasks are configured, or a task is in both sets.
        TaskError: A task directory is broken.
    """
    if config.tasks.family:
        sources = heldout_problems(config), training_problems(config)
        names = ("heldout", "train")
        heldout, train = (
            load_tasks(_generated(family_of(config).tasks.write_task, problems, local / "tasks" / name))
            for problems, name in zip(sources, names, strict=True)
        )
    elif config.tasks.train:
        train = load_tasks(Path(config.tasks.train))
        heldout = load_tasks(Path(config.tasks.heldout)) if config.tasks.heldout else []
    else:
        msg = "no tasks: set tasks.train and tasks.heldout to directories of Harbor tasks, or tasks.family"
        raise ConfigError(msg)
    both = {task.digest for task in train} & {task.digest for task in heldout}
    if both:
        names = sorted(task.task_id for task in heldout if task.digest in both)
        msg = (
            f"{len(both)} held-out tasks are training tasks too, such as {names[0]}: a pass rate on them means nothing"
        )
        raise ConfigError(msg)
    return TaskSets(train, heldout)


def heldout_problems(config: RunConfig) -> list[Any]:
    """Return the held-out problems of a generated family: the same for every seed of a run, so that seeds compare."""
    return list(islice(family_of(config).tasks.problems("heldout"), config.tasks.num_heldout))


def training_problems(config: RunConfig) -> list[Any]:
    """Return the training problems of a generated family; none shares its text with a held-out one."""
    tasks = family_of(config).tasks
    exclude = tasks.texts_of(heldout_problems(config))
    return list(islice(tasks.problems(f"train-{config.run.seed}", exclude=exclude), config.tasks.num_train))


def _generated(write_task: Callable[[Any, Path], Path], problems: Iterable[Any], directory: Path) -> Path:
    """Write the tasks unless they are there; a half-written set is written anew."""
    if not directory.is_dir():
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for problem in problems:
            write_task(problem, partial)
        partial.rename(directory)
    return directory
