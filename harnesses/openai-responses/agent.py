"""A coding agent on OpenAI's SDK: Responses, a shell, reasoning kept, nothing stored with the server.

    agent.py [--max-turns N] [--plain] TASK

The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY, and sends calls again by itself while the server is busy or away.
Commands run in the current directory. `--plain` asks for whole answers instead of streams.

Exit codes: 0 the model submitted or called no tool, 3 the API refused, 4 it could not be reached, 5 out of turns.
"""

import argparse
import json
import os
import subprocess
import sys

import openai
from openai.types.responses import FunctionToolParam, Response, ResponseFunctionToolCall, ResponseInputItemParam

INSTRUCTIONS = "Do the task with the shell tool. Call submit when it is done."
SHELL: FunctionToolParam = {
    "type": "function",
    "name": "shell",
    "description": "Run a command and return its output.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": True,
}
SUBMIT: FunctionToolParam = {
    "type": "function",
    "name": "submit",
    "description": "End the task.",
    "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    "strict": True,
}
COMMAND_TIMEOUT_S = 60
MAX_OUTPUT_CHARS = 8000
REFUSED, UNREACHABLE, OUT_OF_TURNS = 3, 4, 5


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="A coding agent on OpenAI's Responses.")
    parser.add_argument("task")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    try:
        return work(openai.OpenAI(max_retries=4), options)
    except openai.APIConnectionError as error:
        say(f"the model cannot be reached: {error}")
        return UNREACHABLE
    except openai.OpenAIError as error:
        say(f"the model refused: {error}")
        return REFUSED


def work(client: openai.OpenAI, options: argparse.Namespace) -> int:
    """Let the model work until it submits, or calls no tool."""
    items: list[ResponseInputItemParam] = [{"role": "user", "content": options.task}]
    for _ in range(options.max_turns):
        response = ask(client, items, plain=options.plain)
        say(response.output_text)
        # The SDK takes its own items back as they are: messages, reasoning and calls.
        items.extend(response.output)  # pyright: ignore[reportArgumentType]
        calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
        if not calls or any(call.name == "submit" for call in calls):
            return 0
        for call in calls:
            output = shell(call.arguments)
            say(output)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return OUT_OF_TURNS


def ask(client: openai.OpenAI, items: list[ResponseInputItemParam], *, plain: bool) -> Response:
    """Return the model's next response."""
    model = os.environ.get("OPENAI_MODEL", "default")
    if plain:
        return client.responses.create(
            model=model,
            instructions=INSTRUCTIONS,
            input=items,
            tools=[SHELL, SUBMIT],
            parallel_tool_calls=True,
            store=False,
            include=["reasoning.encrypted_content"],
        )
    with client.responses.stream(
        model=model,
        instructions=INSTRUCTIONS,
        input=items,
        tools=[SHELL, SUBMIT],
        parallel_tool_calls=True,
        store=False,
        include=["reasoning.encrypted_content"],
    ) as stream:
        for event in stream:
            # An answer that is cut off ends with another event, for which the helper has no name.
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
    raise openai.OpenAIError("the stream ended without an answer")


def shell(arguments: str) -> str:
    """Return what a command printed, or what is wrong with the call."""
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (ValueError, TypeError, KeyError) as error:
        return f"the call could not be read: {error!r}"
    except subprocess.TimeoutExpired:
        return f"the command took longer than {COMMAND_TIMEOUT_S} s"
    text = done.stdout.decode("utf-8", "replace")[-MAX_OUTPUT_CHARS:]
    return f"{text}[exit {done.returncode}]" if done.returncode else text or "(no output)"


def say(text: str) -> None:
    """Print for whoever watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
