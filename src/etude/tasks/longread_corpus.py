"""Text of the longread family to learn from: drills to pretrain on, and chains of conversations to imitate."""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from etude.tasks.longread import SENTENCES, START, Problem, digest, instruction, note, write_answer
from etude.tasks.longread_words import CODES
from etude.tasks.mini_talk import SO_FAR, SUMMARISE, Message, called, commands, said, user

CARELESS_SHARE = 0.3
"""Of the summaries of a careless demonstration, those that lose something."""

_SOURCE_LINES = 6

_EDGE_SHARE = 0.15
"""Of the drills, those with the first note, as many with the last one, and as many after it."""


_LOST = "none"

_CODED_SHARE = 0.3
"""Of the notes in drills, those with a code."""


class Kept(NamedTuple):
    """What has to be carried from one conversation to the next."""

    code: str
    """The last one so far."""
    following: str
    """Name of the note to read next, or the end."""
    at_end: bool = False
    """Whether there is no note left to read."""

    @property
    def summary(self) -> str:
        """As it is written down."""
        return f"code {self.code or _LOST} {'end' if self.at_end else 'next'} {self.following}"


_NOTHING = Kept("", START)
"""Before the first note there is nothing to write down."""


def source(problem: Problem) -> str:
    """Return a short text in which what a note says is taken up at once: to learn looking up from."""
    random = Random(f"source-{digest(problem)}")
    kept = Kept(random.choice(CODES), START)
    lines = [f"{kept.summary}\n"]
    for following in problem.names[1:_SOURCE_LINES]:
        code = random.choice(CODES) if random.random() < _CODED_SHARE else ""
        before, kept = kept, _with(kept, following, code, problem)
        lines.append(f"cat {before.following} {note(following, code, random, 0, is_last=False)}{kept.summary}\n")
    return "".join(lines)


def shell_log(problem: Problem) -> list[Message]:
    """Return one conversation of somebody who takes care; most notes are shorter than those of a task."""
    random = Random(f"log-{digest(problem)}")
    names = random.choices(
        (problem.end, START, problem.names[-1], random.choice(problem.names[1:])),
        (_EDGE_SHARE, _EDGE_SHARE, _EDGE_SHARE, 1 - 3 * _EDGE_SHARE),
    )
    kept = _NOTHING if names == [START] else Kept(random.choice(CODES), *names, at_end=names == [problem.end])
    if kept.at_end:
        return [_opening(problem, kept), _answer(kept)]
    following, _ = problem.after(kept.following)
    code = random.choice(CODES) if kept == _NOTHING or random.random() < _CODED_SHARE else ""
    text = note(following, code, random, int((SENTENCES + 1) * random.random() ** 3), is_last=following == problem.end)
    read = commands([(f"cat {kept.following}", text)])
    return [_opening(problem, kept), *read, user(SUMMARISE), said(_with(kept, following, code, problem).summary)]


def demonstrations(
    chosen: list[Problem], *, seed: str, good_share: float, is_full: Callable[[list[Message]], bool] = lambda _: False
) -> Iterator[list[Message]]:
    """Yield the conversations of a chain per problem, each without its system message.

    A conversation ends in a summary where `is_full` says of its messages so far, an answer the last of them, that the
    harness would ask for one. `good_share` of the chains are careful; in the others some summaries only tell what the
    newest note said, and so lose the code of an earlier one.
    """
    random = Random(f"demonstrations-{seed}")
    for problem in chosen:
        careless_share = 0.0 if random.random() < good_share else CARELESS_SHARE
        yield from _chain(problem, random, careless_share, is_full)


def _chain(
    problem: Problem, random: Random, careless_share: float, is_full: Callable[[list[Message]], bool]
) -> Iterator[list[Message]]:
    kept = _NOTHING
    talk = [_opening(problem, kept)]
    while not kept.at_end:
        call, result = commands([(f"cat {kept.following}", problem.notes[kept.following])])
        talk.append(call)
        full = is_full(talk)
        talk.append(result)
        following, code = problem.after(kept.following)
        before = _NOTHING if full and random.random() < careless_share else kept
        kept = _with(before, following, code, problem)
        if full:
            yield [*talk, user(SUMMARISE), said(kept.summary)]
            talk = [_opening(problem, kept)]
    yield [*talk, _answer(kept)]


def _with(kept: Kept, following: str, code: str, problem: Problem) -> Kept:
    """Return what to carry after one more note."""
    return Kept(code or kept.code, following, at_end=following == problem.end)


def _opening(problem: Problem, kept: Kept) -> Message:
    """Return what a conversation begins with."""
    so_far = "" if kept == _NOTHING else f"{SO_FAR}\n{kept.summary}"
    return user(instruction(problem) + so_far)


def _answer(kept: Kept) -> Message:
    """Return the answer that writes the result and submits it."""
    return called(("shell", {"command": write_answer(kept.code or _LOST, kept.following)}), ("submit", {}))
