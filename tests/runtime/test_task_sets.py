# pyright: basic
import shutil

import pytest

from etude.config import RunConfig
from etude.errors import ConfigError, TaskError
from etude.runtime.corpus import corpus_problems
from etude.runtime.task_sets import heldout_problems, task_sets, training_problems
from etude.tasks import pyfix


def config(seed=0, **tasks):
    return RunConfig.model_validate({"run": {"seed": seed}, "tasks": tasks, "pretrain": {"documents": 1500}})


def generated(seed=0):
    return config(seed, family="pyfix", num_train=300, num_heldout=60)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_tasks_and_pretraining_text_share_no_module_with_held_out_tasks(seed):
    heldout = pyfix.texts_of(heldout_problems(generated(seed)))
    assert len(heldout) == 120
    for problems in (training_problems(generated(seed)), corpus_problems(generated(seed))):
        assert not heldout & pyfix.texts_of(problems)


def test_seeds_train_on_other_tasks_and_are_measured_on_the_same():
    assert heldout_problems(generated(0)) == heldout_problems(generated(1))
    assert training_problems(generated(0)) != training_problems(generated(1))


def test_a_family_is_generated_once_as_task_directories(tmp_path):
    small = config(family="pyfix", num_train=5, num_heldout=3)
    sets = task_sets(small, tmp_path)
    assert (len(sets.train), len(sets.heldout)) == (5, 3)
    marker = tmp_path / "tasks/train" / sets.train[0].task_id / "instruction.md"
    written = marker.stat().st_mtime_ns
    assert task_sets(small, tmp_path) == sets
    assert marker.stat().st_mtime_ns == written


def test_a_half_written_family_is_written_anew(tmp_path):
    small = config(family="pyfix", num_train=5, num_heldout=3)
    (tmp_path / "tasks/train.partial/left-over").mkdir(parents=True)
    assert len(task_sets(small, tmp_path).train) == 5
    assert not (tmp_path / "tasks/train.partial").exists()


def test_directories_of_tasks_are_read(tmp_path):
    sets = task_sets(config(family="pyfix", num_train=4, num_heldout=2), tmp_path)
    read = task_sets(config(train=str(tmp_path / "tasks/train"), heldout=str(tmp_path / "tasks/heldout")), tmp_path)
    assert read == sets
    assert task_sets(config(train=str(tmp_path / "tasks/train")), tmp_path).heldout == []


def test_a_held_out_task_that_is_trained_on_is_refused_by_name(tmp_path):
    [task, *_] = task_sets(config(family="pyfix", num_train=4, num_heldout=2), tmp_path).train
    shutil.copytree(task.path, tmp_path / "tasks/heldout" / task.task_id)
    with pytest.raises(ConfigError, match=f"1 held-out tasks are training tasks too, such as {task.task_id}"):
        task_sets(config(train=str(tmp_path / "tasks/train"), heldout=str(tmp_path / "tasks/heldout")), tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no tasks: set tasks\.train"):
        task_sets(config(), tmp_path)
    with pytest.raises(TaskError, match="nowhere"):
        task_sets(config(train=str(tmp_path / "nowhere")), tmp_path)
