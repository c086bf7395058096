"""Text of the pyfix family to learn from: sources and shell logs to pretrain on, demonstrations to imitate."""

from collections.abc import Callable, Iterator
from random import Random

from etude.tasks.mini_talk import DONE, Message, called, commands, user
from etude.tasks.pyfix import Problem, instruction, numbered


def source(problem: Problem) -> str:
    """Return the right module as a file."""
    return "\n".join(problem.right) + "\n"


def shell_log(problem: Problem) -> list[Message]:
    """Return what a shell tool recorded while somebody read the faulty module and repaired it: no task, no end."""
    read, repair = (f"cat -n {problem.module}.py", numbered(problem.broken)), (problem.repair, DONE)
    return list(commands([read, repair]))[:-1]


def demonstrations(
    chosen: list[Problem], *, seed: str, good_share: float, is_full: Callable[[list[Message]], bool] = lambda _: False
) -> Iterator[list[Message]]:
    """Yield a conversation per problem, without its system message: `good_share` of them repair the module.

    The others make the mistakes of people in a hurry, one third each: they submit what they read, they show the repair
    but forget to write it (`sed` without `-i`), or they delete the faulty line.
    """
    random = Random(f"demonstrations-{seed}")
    for problem in chosen:
        ran = [(f"cat -n {problem.module}.py", numbered(problem.broken))]
        if random.random() < good_share:
            ran.append((problem.repair, DONE))
        else:
            ran += _mistake(problem, random)
        yield [user(instruction(problem)), *commands(ran), called(("submit", {}), number=len(ran))]


def _mistake(problem: Problem, random: Random) -> list[tuple[str, str]]:
    """Return commands that do not repair the module, with what they print."""
    kind = random.choice(("nothing", "not_written", "deleted"))
    if kind == "nothing":
        return []
    if kind == "not_written":
        return [(problem.repair.replace("sed -i ", "sed ", 1), source(problem))]
    return [(f"sed -i '{problem.line + 1}d' {problem.module}.py", DONE)]
