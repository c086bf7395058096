"""The training and held-out tasks of a run: read from directories, or generated into the run's local directory."""

import shutil
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.tasks import pyfix
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
            load_tasks(_generated(problems, local / "tasks" / name))
            for problems, name in zip(sources, names, strict=True)
        )
    elif config.tasks.train:
        train = load_tasks(Path(config.tasks.train))
        heldout = load_tasks(Path(config.tasks.heldout)) if config.tasks.heldout else []
    else:
        msg = "no tasks: set tasks.train and tasks.heldout to directories of Harbor tasks, or tasks.family = 'pyfix'"
        raise ConfigError(msg)
    both = {task.digest for task in train} & {task.digest for task in heldout}
    if both:
        names = sorted(task.task_id for task in heldout if task.digest in both)
        msg = (
            f"{len(both)} held-out tasks are training tasks too, such as {names[0]}: a pass rate on them means nothing"
        )
        raise ConfigError(msg)
    return TaskSets(train, heldout)


def heldout_problems(config: RunConfig) -> list[pyfix.Problem]:
    """Return the held-out problems of a generated family: the same for every seed of a run, so that seeds compare."""
    return list(islice(pyfix.problems("heldout"), config.tasks.num_heldout))


def training_problems(config: RunConfig) -> list[pyfix.Problem]:
    """Return the training problems of a generated family; none shares a module's text with a held-out one."""
    exclude = pyfix.texts_of(heldout_problems(config))
    return list(islice(pyfix.problems(f"train-{config.run.seed}", exclude=exclude), config.tasks.num_train))


def _generated(problems: Iterable[pyfix.Problem], directory: Path) -> Path:
    """Write the tasks unless they are there; a half-written set is written anew."""
    if not directory.is_dir():
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for problem in problems:
            pyfix.write_task(problem, partial)
        partial.rename(directory)
    return directory
