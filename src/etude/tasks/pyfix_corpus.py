"""Text of the pyfix family to learn from: sources and shell logs to pretrain on, demonstrations to imitate."""

import json
from collections.abc import Iterator
from random import Random

from etude.tasks.pyfix import Problem, instruction, numbered, replace_line

Message = dict[str, object]

DONE = "(no output)"
"""What the mini harness shows for a command that prints nothing."""


def source(problem: Problem) -> str:
    """Return the right module as a file."""
    return "\n".join(problem.right) + "\n"


def shell_log(problem: Problem) -> list[Message]:
    """Return what a shell tool recorded while somebody read the faulty module and repaired it: no task, no end."""
    return list(_calls(problem, [f"cat -n {problem.module}.py", problem.repair]))[:-2]


def demonstrations(chosen: list[Problem], *, seed: str, good_share: float) -> Iterator[tuple[Problem, list[Message]]]:
    """Yield a conversation per problem, without its system message: `good_share` of them repair the module.

    The others make the mistakes that hurried people make, each in its share: they hand in without a change, they
    change a line that was right, or they put back the line as it was.
    """
    random = Random(f"demonstrations-{seed}")
    for problem in chosen:
        commands = [f"cat -n {problem.module}.py"]
        if random.random() < good_share:
            commands.append(problem.repair)
        else:
            commands += _mistake(problem, random)
        yield problem, [{"role": "user", "content": instruction(problem)}, *_calls(problem, commands)]


def _mistake(problem: Problem, random: Random) -> list[str]:
    kind = random.choice(("nothing", "other_line", "same_line"))
    if kind == "nothing":
        return []
    if kind == "same_line":
        return [replace_line(problem.module, problem.line, problem.broken_line)]
    other = random.choice([index for index in range(len(problem.right)) if index != problem.line])
    return [replace_line(problem.module, other, problem.right[problem.line])]


def _calls(problem: Problem, commands: list[str]) -> Iterator[Message]:
    for number, command in enumerate(commands):
        yield _call("shell", {"command": command}, number)
        output = numbered(problem.broken) if number == 0 else DONE
        yield {"role": "tool", "tool_call_id": f"call_{number}", "content": output}
    yield _call("submit", {}, len(commands))


def _call(name: str, arguments: dict[str, str], number: int) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }
