"""Text of the pyfix family to learn from: sources and shell logs to pretrain on, demonstrations to imitate."""

import json
from collections.abc import Iterator
from random import Random

from etude.tasks.pyfix import Problem, instruction, numbered

Message = dict[str, object]

DONE = "(no output)"
"""What the mini harness shows for a command that prints nothing."""


def source(problem: Problem) -> str:
    """Return the right module as a file."""
    return "\n".join(problem.right) + "\n"


def shell_log(problem: Problem) -> list[Message]:
    """Return what a shell tool recorded while somebody read the faulty module and repaired it: no task, no end."""
    read, repair = (f"cat -n {problem.module}.py", numbered(problem.broken)), (problem.repair, DONE)
    return list(_calls([read, repair]))[:-2]


def demonstrations(chosen: list[Problem], *, seed: str, good_share: float) -> Iterator[tuple[Problem, list[Message]]]:
    """Yield a conversation per problem, without its system message: `good_share` of them repair the module.

    The others make the mistakes of people in a hurry, one third each: they submit what they read, they show the repair
    but forget to write it (`sed` without `-i`), or they delete the faulty line.
    """
    random = Random(f"demonstrations-{seed}")
    for problem in chosen:
        commands = [(f"cat -n {problem.module}.py", numbered(problem.broken))]
        if random.random() < good_share:
            commands.append((problem.repair, DONE))
        else:
            commands += _mistake(problem, random)
        yield problem, [{"role": "user", "content": instruction(problem)}, *_calls(commands)]


def _mistake(problem: Problem, random: Random) -> list[tuple[str, str]]:
    """Return commands that do not repair the module, with what they print."""
    kind = random.choice(("nothing", "not_written", "deleted"))
    if kind == "nothing":
        return []
    if kind == "not_written":
        return [(problem.repair.replace("sed -i ", "sed ", 1), source(problem))]
    return [(f"sed -i '{problem.line + 1}d' {problem.module}.py", DONE)]


def _calls(commands: list[tuple[str, str]]) -> Iterator[Message]:
    for number, (command, output) in enumerate(commands):
        yield _call("shell", {"command": command}, number)
        yield {"role": "tool", "tool_call_id": f"call_{number}", "content": output}
    yield _call("submit", {}, len(commands))


def _call(name: str, arguments: dict[str, str], number: int) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }
