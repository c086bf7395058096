"""A coding agent on OpenAI's SDK: Chat Completions, a shell, answers as a stream.

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
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam, ChatCompletionToolParam

SYSTEM = "Do the task with the shell tool. Call submit when it is done."
SHELL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
SUBMIT: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "End the task.",
        "parameters": {"type": "object", "properties": {}},
    },
}
COMMAND_TIMEOUT_S = 60
MAX_OUTPUT_CHARS = 8000
REFUSED, UNREACHABLE, OUT_OF_TURNS = 3, 4, 5


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="A coding agent on OpenAI's Chat Completions.")
    parser.add_argument("task")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    try:
        return work(openai.OpenAI(max_retries=4), options)
    except openai.APIConnectionError as error:
        say(f"the model cannot be reached: {error}")
        return UNREACHABLE
    except openai.APIStatusError as error:
        say(f"the model refused: {error.message}")
        return REFUSED


def work(client: openai.OpenAI, options: argparse.Namespace) -> int:
    """Let the model work until it submits, or calls no tool."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": options.task},
    ]
    for _ in range(options.max_turns):
        message = ask(client, messages, plain=options.plain)
        say(message.content or "")
        # The SDK takes its own messages back as they are.
        messages.append(message)  # pyright: ignore[reportArgumentType]
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        if not calls or any(call.function.name == "submit" for call in calls):
            return 0
        for call in calls:
            output = shell(call.function.arguments)
            say(output)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return OUT_OF_TURNS


def ask(client: openai.OpenAI, messages: list[ChatCompletionMessageParam], *, plain: bool) -> ChatCompletionMessage:
    """Return the model's next message."""
    model = os.environ.get("OPENAI_MODEL", "default")
    if plain:
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[SHELL, SUBMIT], parallel_tool_calls=True
        )
        return answer.choices[0].message
    try:
        with client.chat.completions.stream(
            model=model, messages=messages, tools=[SHELL, SUBMIT], parallel_tool_calls=True
        ) as stream:
            return stream.get_final_completion().choices[0].message
    except openai.LengthFinishReasonError as error:
        return error.completion.choices[0].message


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
