"""Text of the longread family to learn from: drills to pretrain on, and chains of conversations to imitate."""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from etude.tasks.longread import END, MOST, SENTENCES, START, Problem, digest, instruction, note, write_answer
from etude.tasks.mini_talk import SO_FAR, SUMMARISE, Message, called, commands, said, user

CARELESS_SHARE = 0.3
"""Of the summaries of a careless demonstration, those that lose something."""

_SOURCE_LINES = 6

_EDGE_SHARE = 0.2
"""Of the drills, those with the first note, and again those with the end."""


class Kept(NamedTuple):
    """What has to be carried from one conversation to the next."""

    total: int
    """Last digit of the sum so far."""
    following: str
    """Name of the note to read next."""

    @property
    def summary(self) -> str:
        """As it is written down."""
        return f"total {self.total} next {self.following}"


_NOTHING = Kept(0, START)
"""Before the first note there is nothing to write down."""


def source(problem: Problem) -> str:
    """Return a short text in which what a note says is taken up at once: to learn looking up and adding from."""
    random = Random(f"source-{digest(problem)}")
    kept = Kept(random.randrange(10), START)
    lines = [f"{kept.summary}\n"]
    for following in problem.names[1:_SOURCE_LINES]:
        number = random.randint(1, MOST)
        before, kept = kept, _with(kept, following, number)
        lines.append(f"cat {before.following} {note(following, number, random, 0)}{kept.summary}\n")
    return "".join(lines)


def shell_log(problem: Problem) -> list[Message]:
    """Return one conversation of somebody who takes care; most notes are shorter than those of a task."""
    random = Random(f"log-{digest(problem)}")
    place = random.random()
    *names, end = (*problem.names[1:], END)
    if place < _EDGE_SHARE:
        kept = Kept(random.randrange(10), end)
        return [_opening(problem, kept), _answer(kept)]
    kept = _NOTHING if place > 1 - _EDGE_SHARE else Kept(random.randrange(10), random.choice(names))
    following, number = problem.after(kept.following)
    text = note(following, number, random, int((SENTENCES + 1) * random.random() ** 2))
    read = commands([(f"cat {kept.following}", text)])
    return [_opening(problem, kept), *read, user(SUMMARISE), said(_with(kept, following, number).summary)]


def demonstrations(
    chosen: list[Problem], *, seed: str, good_share: float, is_full: Callable[[list[Message]], bool] = lambda _: False
) -> Iterator[list[Message]]:
    """Yield the conversations of a chain per problem, each without its system message.

    A conversation ends in a summary where `is_full` says of its messages so far, an answer the last of them, that the
    harness would ask for one. `good_share` of the chains are careful; in the others some summaries lose something: what
    the notes before, or the newest one, added to the sum.
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
    while kept.following != END:
        call, result = commands([(f"cat {kept.following}", problem.notes[kept.following])])
        talk.append(call)
        full = is_full(talk)
        talk.append(result)
        following, number = problem.after(kept.following)
        if full and random.random() < careless_share:
            number = random.choice((0, number - kept.total))
        kept = _with(kept, following, number)
        if full:
            yield [*talk, user(SUMMARISE), said(kept.summary)]
            talk = [_opening(problem, kept)]
    yield [*talk, _answer(kept)]


def _with(kept: Kept, following: str, number: int) -> Kept:
    """Return what to carry after one more note."""
    return Kept((kept.total + number) % 10, following)


def _opening(problem: Problem, kept: Kept) -> Message:
    """Return what a conversation begins with."""
    so_far = "" if kept == _NOTHING else f"{SO_FAR}\n{kept.summary}"
    return user(instruction(problem) + so_far)


def _answer(kept: Kept) -> Message:
    """Return the answer that writes the result and submits it."""
    return called(("shell", {"command": write_answer(kept.total)}), ("submit", {}))
