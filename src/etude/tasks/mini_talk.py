"""What the mini harness says, and what its tools are called with: the messages that demonstrations are made of."""

import json
from collections.abc import Iterator

Message = dict[str, object]

SYSTEM = "Do the task with the shell tool. Call submit when it is done."
SUMMARISE = "The context is full. Write down all that you need to go on. The rest is forgotten."
SO_FAR = "You wrote down:"

DONE = "(no output)"
"""What a command that prints nothing is shown as."""


def user(text: str) -> Message:
    """Return what the user, or the harness in the user's place, says."""
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    """Return an answer without a tool call."""
    return {"role": "assistant", "content": text}


def called(*calls: tuple[str, dict[str, str]], number: int = 0) -> Message:
    """Return an answer that calls tools by name with these arguments."""
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    ids = (f"call_{number + place}" for place in range(len(calls)))
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": name, "type": "function", "function": function}
            for name, function in zip(ids, functions, strict=True)
        ],
    }


def commands(ran: list[tuple[str, str]]) -> Iterator[Message]:
    """Yield shell commands with what they printed, one a turn."""
    for number, (command, output) in enumerate(ran):
        yield called(("shell", {"command": command}), number=number)
        yield {"role": "tool", "tool_call_id": f"call_{number}", "content": output}
