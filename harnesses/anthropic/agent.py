"""A coding agent on Anthropic's SDK: Messages, a shell, streams, and a summary when the context grows too long.

    agent.py [--max-turns N] [--compact-at TOKENS] [--plain] TASK

The SDK reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and sends calls again by itself while the server is busy or
away. Commands run in the current directory. Once the next prompt has more than TOKENS tokens, as `count_tokens` says,
or is refused as too long, the model is asked for a summary and goes on from that alone.
`--plain` asks for whole answers instead of streams.

Exit codes: 0 the model submitted or called no tool, 3 the API refused, 4 it could not be reached, 5 out of turns.
"""

import argparse
import os
import subprocess
import sys

import anthropic
from anthropic.types import Message, MessageParam, ToolParam, ToolResultBlockParam, ToolUseBlock

SYSTEM = "Do the task with the shell tool. Call submit when it is done."
SUMMARISE = (
    "Summarise what was done, what was found out and what is left, for somebody who goes on without this history."
)
SHELL: ToolParam = {
    "name": "shell",
    "description": "Run a command and return its output.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
SUBMIT: ToolParam = {
    "name": "submit",
    "description": "End the task.",
    "input_schema": {"type": "object", "properties": {}},
}
COMMAND_TIMEOUT_S = 60
MAX_OUTPUT_CHARS = 8000
MAX_TOKENS = 4096
REFUSED, UNREACHABLE, OUT_OF_TURNS = 3, 4, 5


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="A coding agent on Anthropic's Messages.")
    parser.add_argument("task")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--compact-at", type=int, default=150_000)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    try:
        return work(anthropic.Anthropic(max_retries=4), options)
    except anthropic.APIConnectionError as error:
        say(f"the model cannot be reached: {error}")
        return UNREACHABLE
    except anthropic.APIStatusError as error:
        say(f"the model refused: {error.message}")
        return REFUSED


def work(client: anthropic.Anthropic, options: argparse.Namespace) -> int:
    """Let the model work until it submits, or calls no tool."""
    messages: list[MessageParam] = [{"role": "user", "content": options.task}]
    for _ in range(options.max_turns):
        if len(messages) > 1 and count(client, messages) > options.compact_at:
            messages = compacted(client, messages, options)
        try:
            message = ask(client, messages, plain=options.plain)
        except anthropic.BadRequestError as error:
            if "too long" not in error.message or len(messages) < len(("task", "calls", "results")):
                raise
            # Without its last calls and results the history fits: it did when they were made.
            messages = compacted(client, messages[:-2], options)
            continue
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
        if not calls or any(call.name == "submit" for call in calls):
            return 0
        results: list[ToolResultBlockParam] = []
        for call in calls:
            output = shell(call.input)
            say(output)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": output})
        messages.append({"role": "user", "content": results})
    return OUT_OF_TURNS


def count(client: anthropic.Anthropic, messages: list[MessageParam]) -> int:
    """Return how many tokens the next prompt has."""
    model = os.environ.get("ANTHROPIC_MODEL", "default")
    counted = client.messages.count_tokens(model=model, system=SYSTEM, messages=messages, tools=[SHELL, SUBMIT])
    return counted.input_tokens


def compacted(
    client: anthropic.Anthropic, messages: list[MessageParam], options: argparse.Namespace
) -> list[MessageParam]:
    """Return a history that holds the task and the model's own summary of what came after it."""
    say("[the history is summarised]")
    message = ask(client, [*messages, {"role": "user", "content": SUMMARISE}], plain=options.plain)
    summary = "".join(block.text for block in message.content if block.type == "text")
    return [{"role": "user", "content": f"{options.task}\n\nSummary of what was done so far:\n{summary}"}]


def ask(client: anthropic.Anthropic, messages: list[MessageParam], *, plain: bool) -> Message:
    """Return the model's next message."""
    model = os.environ.get("ANTHROPIC_MODEL", "default")
    if plain:
        message = client.messages.create(
            model=model, max_tokens=MAX_TOKENS, system=SYSTEM, messages=messages, tools=[SHELL, SUBMIT]
        )
    else:
        with client.messages.stream(
            model=model, max_tokens=MAX_TOKENS, system=SYSTEM, messages=messages, tools=[SHELL, SUBMIT]
        ) as stream:
            message = stream.get_final_message()
    say("".join(block.text for block in message.content if block.type == "text"))
    return message


def shell(arguments: object) -> str:
    """Return what a command printed, or what is wrong with the call."""
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str):
        return 'the input must be {"command": "..."}'
    try:
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (ValueError, subprocess.TimeoutExpired) as error:
        return f"the command did not run to its end: {error}"
    text = done.stdout.decode("utf-8", "replace")[-MAX_OUTPUT_CHARS:]
    return f"{text}[exit {done.returncode}]" if done.returncode else text or "(no output)"


def say(text: str) -> None:
    """Print for whoever watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
