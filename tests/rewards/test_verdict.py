# pyright: basic
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.protection import sort_change
from etude.rewards.screens import reaches_for_the_grader
from etude.rewards.verdict import read_verdict
from etude.types import Task

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-3, 3)


@given(st.binary(max_size=40), st.sampled_from(["reward.json", "reward.txt"]))
def test_any_bytes_give_a_reward_between_0_and_1_or_a_failure(content, name):
    grade = read_verdict({name: content})
    assert (grade.reward is None) == bool(grade.failure)
    assert grade.reward is None or 0.0 <= grade.reward <= 1.0


@given(st.dictionaries(st.sampled_from("abc"), numbers, min_size=1))
def test_the_reward_is_the_mean_where_no_value_is_called_reward(values):
    grade = read_verdict({"reward.json": json.dumps(values).encode()})
    mean = sum(values.values()) / len(values) if all(map(math.isfinite, values.values())) else math.nan
    assert grade.reward == (mean if 0 <= mean <= 1 else None)


@given(st.floats(0, 1), st.floats(-9, 9))
def test_the_value_called_reward_counts_alone(reward, other):
    assert read_verdict({"reward.json": json.dumps({"reward": reward, "other": other}).encode()}).reward == reward


def test_booleans_strings_and_nested_values_are_no_rewards():
    for value in (True, "1", None, [1], {"x": 1}):
        assert read_verdict({"reward.json": json.dumps({"reward": value}).encode()}).reward is None


paths = st.lists(st.sampled_from(["a", "..", ".", "", "b.py", "__pycache__", "x.pyc", "conftest.py", "json", "\0"]))


@given(paths.map("/".join), st.booleans())
def test_only_plain_relative_paths_are_ever_applied(path, absolute):
    path = "/" + path if absolute else path
    parts = path.split("/")
    found = sort_change({path: b""})
    assert set(found.applied) <= {path}
    if found.applied:
        assert not {"", ".", ".."} & set(parts)
        assert "\0" not in path
        assert "__pycache__" not in parts
    steers = parts[-1] == "conftest.py" or (parts[0] == "json" and parts[-1].endswith(".py"))
    assert bool(found.protected) == bool(found.applied and steers)


def test_what_starts_with_the_interpreter_or_steers_test_tools_is_protected_anywhere():
    names = ["sitecustomize.py", "a/usercustomize.py", "x.pth", "deep/conftest.py", "pyproject.toml", "SetUp.cfg"]
    names.append("pytest.py")
    assert set(sort_change(dict.fromkeys(names, b"")).protected) == set(names)
    assert sort_change(dict.fromkeys(["solution.py", "a/json.py", "tests/test_x.py", "json.txt"], b"")).protected == {}


def test_evidence_names_file_line_and_text():
    task = Task(task_id="t", path="/t", digest="d", instruction="")
    change = {"a.py": b"ok = 1\nopen('/logs/verifier/reward.txt', 'w')\n", "gone.py": None}
    assert reaches_for_the_grader(task, change) == "a.py:2: open('/logs/verifier/reward.txt', 'w')"
    assert reaches_for_the_grader(task, {"a.py": b"ok = 1\n"}) == ""
