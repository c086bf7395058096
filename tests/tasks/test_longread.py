# pyright: basic
"""Trails of notes that are too long for a context."""

import subprocess
from itertools import islice

import pytest

from etude.tasks import longread
from etude.tasks.harbor import load_task
from etude.tasks.lint import lint
from etude.tasks.longread_words import ADJECTIVES, NAMES, NOUNS, VERBS


def take(count, seed="x", exclude=frozenset()):
    return list(islice(longread.problems(seed, exclude=exclude), count))


def follow(problem):
    """Read the notes as an agent would; return the names in order and the places of codes, with the last one."""
    name, names, code, places = longread.START, [], "", []
    while name:
        names.append(name)
        text = problem.notes[name]
        if "The code is " in text:
            code = text.partition("The code is ")[2].partition(".")[0]
            places.append(len(names) - 1)
        name = text.partition("The next note is ")[2].partition(".")[0]
    return tuple(names), places, code


def test_the_answer_is_found_by_following_the_trail_to_its_end():
    for problem in take(20):
        names, _, code = follow(problem)
        assert names == problem.names
        assert problem.notes[names[-1]].endswith(f"The trail ends at {problem.end}.\n")
        assert len(set(names)) == len(problem.notes) == longread.NUM_NOTES
        assert problem.code == code


def test_the_last_code_has_to_be_carried_over_several_notes():
    for problem in take(50):
        _, places, _ = follow(problem)
        assert len(places) == longread.CODED_NOTES
        assert places[-1] < longread.LAST_CODE <= longread.NUM_NOTES - 5


def test_answers_are_spread_so_that_guessing_does_not_pay():
    problems = take(500)
    answers = [(problem.code, problem.end) for problem in problems]
    assert max(answers.count(answer) for answer in answers) < 25
    ends = [problem.end for problem in problems]
    assert max(ends.count(end) for end in NAMES) < 50


def test_idle_talk_names_no_note():
    assert not {*NAMES, longread.START} & {*ADJECTIVES, *NOUNS, *VERBS}


def test_a_seed_gives_the_same_problems_and_splits_share_no_trail():
    assert take(5) == take(5)
    heldout = longread.texts_of(take(50, "heldout"))
    assert not heldout & longread.texts_of(take(200, exclude=heldout))


def test_a_task_is_a_clean_harbor_task(tmp_path):
    [problem] = take(1)
    path = longread.write_task(problem, tmp_path)
    assert load_task(path).instruction == longread.instruction(problem)
    assert lint(path) == []


@pytest.mark.parametrize("kind", ["right", "told", "wrong", "none", "link", "huge"])
def test_the_tests_pass_the_right_answer_alone(tmp_path, kind):
    [problem] = take(1)
    task = longread.write_task(problem, tmp_path / "tasks")
    app, logs = tmp_path / "app", tmp_path / "logs"
    app.mkdir()
    logs.mkdir()
    answer = app / "answer.txt"
    match kind:
        case "right":
            answer.write_text(f"{problem.code} {problem.end}\n")
        case "told":
            answer.write_text(f"code {problem.code} end {problem.end}\n")
        case "wrong":
            answer.write_text(f"{(int(problem.code) + 1) % 10} {problem.end}\n")
        case "link":
            answer.symlink_to(task / "tests" / "expected.txt")
        case "huge":
            answer.write_text(f"{problem.code} {problem.end}\n" * 10_000)
    script = (task / "tests" / "test.sh").read_text()
    for inside, outside in (("/app/", f"{app}/"), ("/tests/", f"{task}/tests/"), ("/logs/verifier/", f"{logs}/")):
        script = script.replace(inside, outside)
    subprocess.run(["sh", "-c", script], check=True)
    assert (logs / "reward.txt").read_text() == ("1\n" if kind in {"right", "told"} else "0\n")


def test_the_solution_writes_the_answer(tmp_path):
    [problem] = take(1)
    task = longread.write_task(problem, tmp_path / "tasks")
    subprocess.run(["sh", str(task / "solution" / "solve.sh")], cwd=tmp_path, check=True)
    assert (tmp_path / "answer.txt").read_text() == f"code {problem.code} end {problem.end}\n"
