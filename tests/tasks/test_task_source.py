# pyright: basic
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EndOfTasksError, TaskError
from etude.tasks.source import SeededTaskSource
from etude.types import Task

IDS = st.lists(st.text("abcdefgh-", min_size=1, max_size=6), min_size=1, max_size=12, unique=True)


def tasks_of(ids, digest="0"):
    return [Task(task_id=task_id, path=f"/{task_id}", digest=digest, instruction="do it") for task_id in ids]


def take(source, number):
    return [source.next_task().task_id for _ in range(number)]


@given(IDS, st.integers(), st.data())
def test_any_interleaving_of_cursor_and_restore_gives_each_task_once_per_epoch(ids, seed, data):
    source = SeededTaskSource(tasks_of(ids), seed)
    seen = []
    while len(seen) < 3 * len(ids):
        match data.draw(st.sampled_from(["next", "crash", "replay"])):
            case "next":
                seen.append(source.next_task().task_id)
            case "crash":
                cursor = source.cursor()
                source = SeededTaskSource(tasks_of(data.draw(st.permutations(ids))), seed)
                source.restore(cursor)
            case "replay":
                cursor = source.cursor()
                take(source, data.draw(st.integers(0, 2 * len(ids))))
                source.restore(cursor)
    epochs = [seen[start : start + len(ids)] for start in range(0, len(seen), len(ids))]
    assert all(Counter(epoch) == Counter(ids) for epoch in epochs)
    assert seen == take(SeededTaskSource(tasks_of(ids), seed), len(seen))


def test_the_order_is_the_same_on_every_machine_and_python():
    assert take(SeededTaskSource(tasks_of("abcde"), 7), 10) == list("dbceacbade")


def test_orders_differ_between_epochs_and_between_seeds():
    ids = [f"task-{number}" for number in range(30)]
    first = take(SeededTaskSource(tasks_of(ids), 0), 60)
    other = take(SeededTaskSource(tasks_of(ids), 1), 30)
    assert first[:30] != first[30:]
    assert first[:30] != other


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_the_source_ends_after_its_epochs_and_stays_ended(epochs):
    source = SeededTaskSource(tasks_of("abc"), 0, epochs)
    take(source, 3 * epochs)
    for _ in range(2):
        with pytest.raises(EndOfTasksError):
            source.next_task()
    again = SeededTaskSource(tasks_of("abc"), 0, epochs)
    again.restore(source.cursor())
    with pytest.raises(EndOfTasksError):
        again.next_task()


def test_a_cursor_is_small_json_whatever_the_number_of_tasks():
    source = SeededTaskSource(tasks_of(str(number) for number in range(2000)), 0)
    take(source, 1500)
    assert len(source.cursor()) < 200
    assert json.loads(source.cursor())["position"] == 1500


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SeededTaskSource(tasks_of("abd"), 0), "the tasks are not those of the checkpoint"),
        (SeededTaskSource(tasks_of("abc", digest="1"), 0), "the tasks are not those of the checkpoint"),
        (SeededTaskSource(tasks_of("abc"), 1), "set run.seed = 1"),
    ],
)
def test_a_cursor_over_other_tasks_or_another_seed_is_refused(other, message):
    source = SeededTaskSource(tasks_of("abc"), 0)
    with pytest.raises(TaskError, match=message):
        source.restore(other.cursor())


@given(st.binary(max_size=60))
def test_a_damaged_cursor_is_refused_and_changes_nothing(damaged):
    source = SeededTaskSource(tasks_of("abc"), 0)
    before = source.cursor()
    with pytest.raises(TaskError):
        source.restore(damaged)
    assert source.cursor() == before


@pytest.mark.parametrize("change", [{"format": 2}, {"epoch": -1}, {"position": -1}, {"position": 4}, {"more": 1}])
def test_a_cursor_out_of_range_is_refused(change):
    source = SeededTaskSource(tasks_of("abc"), 0)
    cursor = json.loads(source.cursor()) | change
    with pytest.raises(TaskError):
        source.restore(json.dumps(cursor).encode())


@pytest.mark.parametrize("ids", [[], ["a", "b", "a"]])
def test_no_tasks_and_the_same_task_twice_are_refused(ids):
    with pytest.raises(TaskError):
        SeededTaskSource(tasks_of(ids), 0)
