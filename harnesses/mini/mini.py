"""mini: a small agent. It gives a model a shell and stops when the model submits.

    mini.py [--max-turns N] [--timeout SECONDS] [--max-output BYTES] INSTRUCTION
    mini.py [...] --file PATH

The last argument is the instruction, whatever it looks like, or the file that holds it. The model is reached over plain
HTTP at OPENAI_BASE_URL (OpenAI's Chat Completions) with OPENAI_API_KEY. Commands run in the current directory. What was
said is printed to standard output.

With ETUDE_COMPACTION_TRIGGER_TOKENS set, a conversation that has grown to so many tokens, or that the model's context
cannot hold, is given up for a new one: the instruction and the summary that the model wrote of the old one.

Exit codes: 0 submitted, 2 called wrongly, 3 the model API refused for good, 4 it could not be reached, 5 out of turns,
6 the model stopped without submitting.
"""

import json
import os
import select
import socket
import sys
import time

SYSTEM = "Do the task with the shell tool. Call submit when it is done."
REMINDER = "Call a tool: shell to go on, submit if the task is done."
CUT_OFF = "The answer was cut off at its longest length. Be brief and call a tool."
SUMMARISE = "The context is full. Write down all that you need to go on. The rest is forgotten."
SO_FAR = "You wrote down:"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command with /bin/sh and return its output.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "End the task.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
SUBMITTED, USAGE, REFUSED, UNREACHABLE, OUT_OF_TURNS, GAVE_UP = 0, 2, 3, 4, 5, 6
OK, BUSY = 200, (408, 409, 429)
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
MAX_PAUSE_S = 30.0
REPLY_TIMEOUT_S = 900.0
SIGKILL = 9


class StopError(Exception):
    """The agent ends; carries its exit code and a line for the transcript."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class TooLongError(StopError):
    """The conversation does not fit the model's context."""


def main(argv: list[str]) -> int:
    """Return the exit code."""
    try:
        options, instruction = read_arguments(argv)
        address = read_address(os.environ.get("OPENAI_BASE_URL", ""))
        key = os.environ.get("OPENAI_API_KEY", "")
        work(Model(address, key, os.environ.get("OPENAI_MODEL", "default")), instruction, options)
    except StopError as stop:
        say("end", str(stop))
        return stop.code
    return SUBMITTED


def read_arguments(argv: list[str]) -> tuple[dict[str, int], str]:
    """Return options by name, and the instruction."""
    options = {"--max-turns": 50, "--timeout": 30, "--max-output": 8000}
    *arguments, last = argv or [""]
    while len(arguments) > 1 and arguments[0] in options:
        name, value = arguments.pop(0), arguments.pop(0)
        if not value.isdigit() or int(value) == 0:
            raise StopError(USAGE, f"{name} needs a whole number above 0, not {value!r}")
        options[name] = int(value)
    if arguments == ["--file"]:
        try:
            with open(last, encoding="utf-8") as file:  # noqa: PTH123 pathlib would double the time to start
                last = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise StopError(USAGE, f"{last} cannot be read: {error}") from error
    elif arguments:
        raise StopError(USAGE, f"{arguments[0]} is no option; known are {', '.join(options)} and --file")
    if not last:
        raise StopError(USAGE, "an instruction is needed: mini.py [OPTION VALUE]... INSTRUCTION")
    return options, last


def read_address(url: str) -> tuple[str, int, str]:
    """Return host, port and path of Chat Completions below a base URL."""
    scheme, _, rest = url.partition("://")
    place, _, path = rest.partition("/")
    host, _, port = place.partition(":")
    if scheme != "http" or not host or not (port or "80").isdigit():
        raise StopError(USAGE, f"OPENAI_BASE_URL must look like http://127.0.0.1:8080/v1, not {url!r}")
    return host, int(port or 80), f"/{path}".rstrip("/") + "/chat/completions"


def read_trigger(text: str) -> int:
    """Return the tokens from which on a conversation is summarised; 0 is never."""
    if not (text or "0").isdigit():
        raise StopError(USAGE, f"ETUDE_COMPACTION_TRIGGER_TOKENS needs a whole number, not {text!r}")
    return int(text or "0")


def work(model: "Model", instruction: str, options: dict[str, int]) -> None:
    """Let the model work until it submits; raise StopError otherwise."""
    trigger = read_trigger(os.environ.get("ETUDE_COMPACTION_TRIGGER_TOKENS", ""))
    messages = opening(instruction)
    reminded = False
    for _ in range(options["--max-turns"]):
        try:
            message, is_cut = model.ask(messages)
        except TooLongError:
            if not trigger:
                raise
            messages = opening(with_summary(model, instruction, messages))
            continue
        messages.append(message)
        say("assistant", message["content"] or "")
        if not message.get("tool_calls"):
            if reminded:
                raise StopError(GAVE_UP, "no tool was called twice")
            reminded = True
            messages.append({"role": "user", "content": CUT_OFF if is_cut else REMINDER})
            say("user", messages[-1]["content"])
        for call in message.get("tool_calls", ()):
            say("call", f"{call['function']['name']} {call['function']['arguments']}")
            if call["function"]["name"] == "submit":
                say("end", "submitted")
                return
            result = use_tool(call["function"], options)
            say("tool", result)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if trigger and model.used >= trigger:
            messages = opening(with_summary(model, instruction, messages))
    raise StopError(OUT_OF_TURNS, "no turns are left")


def opening(text: str) -> list[dict]:
    """Return the first messages of a conversation."""
    say("user", text)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def with_summary(model: "Model", instruction: str, messages: list[dict]) -> str:
    """Return the instruction and what the model wants to keep of the conversation, word for word.

    It is asked as in any other turn. When not even that fits, the last turns are left out until it does.
    """
    question = {"role": "user", "content": SUMMARISE}
    say("user", SUMMARISE)
    while True:
        try:
            summary = model.ask([*messages, question])[0]["content"] or ""
        except TooLongError:
            messages = without_last_turn(messages)
        else:
            say("assistant", summary)
            return f"{ended(instruction)}{SO_FAR}\n{summary}"


def without_last_turn(messages: list[dict]) -> list[dict]:
    """Return the messages before the last answer; a conversation without one cannot be shortened."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise StopError(REFUSED, "the first prompt does not fit the model's context")
    return messages[: answers[-1]]


def use_tool(function: dict[str, str], options: dict[str, int]) -> str:
    """Return what the model is told about a call of a tool."""
    if function["name"] != "shell":
        return f"there is no tool {function['name']}"
    try:
        command = json.loads(function["arguments"])["command"]
    except (ValueError, TypeError, KeyError, RecursionError):
        command = None
    if not isinstance(command, str) or "\0" in command:
        return 'arguments must be {"command": "..."}'
    return run_shell(command, options["--timeout"], options["--max-output"])


def run_shell(command: str, timeout_s: int, max_bytes: int) -> str:
    """Run a command with its own process group and return what it printed; what it leaves running is killed."""
    source, sink = os.pipe()
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, sink, 1),
        (os.POSIX_SPAWN_DUP2, sink, 2),
    ]
    program = ["sh", "-c", command.encode("utf-8", "replace")]
    try:
        pid = os.posix_spawn("/bin/sh", program, env, file_actions=actions, setpgroup=0)
    except OSError as error:
        os.close(source)
        os.close(sink)
        return f"the command could not be started: {error.strerror}"
    os.close(sink)
    output, finished = read_until_exit(source, pid, time.monotonic() + timeout_s, max_bytes)
    os.killpg(pid, SIGKILL)  # the group exists until its leader is waited for
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(source)
    text = output.decode("utf-8", "replace")
    if not finished:
        return f"{ended(text)}[killed after {timeout_s} s]"
    return f"{ended(text)}[exit {code}]" if code else text or "(no output)"


def ended(text: str) -> str:
    """Return the text with a line break at its end, unless it is empty."""
    return text if not text or text.endswith("\n") else text + "\n"


def read_until_exit(source: int, pid: int, deadline: float, max_bytes: int) -> tuple[bytes, bool]:
    """Return the output, its middle left out beyond `max_bytes`, and whether the shell ended in time.

    The end of the shell counts, not that of the output: a background process may keep the pipe open.
    """
    exit_fd = os.pidfd_open(pid)
    os.set_blocking(source, False)
    head, tail, total = b"", b"", 0
    is_open, finished = True, False
    while True:
        wait_s = 0 if finished else max(0.0, deadline - time.monotonic())
        ready = select.select([source] * is_open + [exit_fd] * (not finished), [], [], wait_s)[0]
        if source in ready:
            chunk = os.read(source, 65536)
            is_open = bool(chunk)
            total += len(chunk)
            room = max(0, max_bytes // 2 - len(head))
            head, tail = head + chunk[:room], (tail + chunk[room:])[-(max_bytes - max_bytes // 2) :]
        finished = finished or exit_fd in ready
        # After the end of the shell, what is in the pipe is still read, but no longer than the deadline.
        if (source not in ready and (finished or not ready)) or time.monotonic() > deadline:
            break
    os.close(exit_fd)
    left_out = total - len(head) - len(tail)
    middle = b"\n[%d bytes left out]\n" % left_out if left_out else b""
    return head + middle + tail, finished


class Model:
    """Chat Completions over HTTP/1.0: one connection a call, no chunked bodies."""

    def __init__(self, address: tuple[str, int, str], key: str, name: str) -> None:
        self.host, self.port, self.path = address
        self.key = key
        self.name = name
        self.calls = 0
        self.used = 0
        """Tokens of the last prompt and its answer."""

    def ask(self, messages: list[dict]) -> tuple[dict, bool]:
        """Return the assistant's message and whether it was cut off; try again while the server is busy or away."""
        body = json.dumps({"model": self.name, "messages": messages, "tools": TOOLS}).encode()
        self.calls += 1
        problem = ""
        for pause_s in (*PAUSES_S, None):
            status, headers, reply, problem = self.exchange(body)
            if status == OK:
                answer = read_answer(reply)
                if answer is not None:
                    message, is_cut, self.used = answer
                    return message, is_cut
                problem = "the reply holds no message"
            elif status in range(400, 500) and status not in BUSY:
                kind = TooLongError if b"context_length_exceeded" in reply else StopError
                raise kind(REFUSED, f"HTTP {status}: {reply[:500].decode('utf-8', 'replace')}")
            if pause_s is not None:
                time.sleep(min(MAX_PAUSE_S, read_seconds(headers.get("retry-after", ""), pause_s)))
        raise StopError(UNREACHABLE, f"the model API gives no answer: {problem}")

    def exchange(self, body: bytes) -> tuple[int, dict[str, str], bytes, str]:
        """Return status (0 when there was none), headers, body and what went wrong."""
        head = (
            f"POST {self.path} HTTP/1.0\r\nHost: {self.host}:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Idempotency-Key: call-{self.calls}\r\n\r\n"
        )
        try:
            with socket.create_connection((self.host, self.port), REPLY_TIMEOUT_S) as connection:
                connection.sendall(head.encode("latin-1", "replace") + body)
                with connection.makefile("rb") as stream:
                    raw = stream.read()
        except OSError as error:
            return 0, {}, b"", str(error)
        start, _, reply = raw.partition(b"\r\n\r\n")
        first, *lines = start.decode("latin-1").split("\r\n")
        status = first.split(" ")[1] if first.startswith("HTTP/1.") else ""
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = headers.get("content-length", "")
        if not status.isdigit() or (length.isdigit() and len(reply) != int(length)):
            return 0, {}, b"", "the reply was cut short"
        return int(status), headers, reply, f"HTTP {status}"


def read_answer(reply: bytes) -> tuple[dict, bool, int] | None:
    """Return the assistant's message of a reply, whether it was cut off and the tokens until its end, or None."""
    try:
        body = json.loads(reply)
        choice = body["choices"][0]
        message = choice["message"]
        used = int((body.get("usage") or {}).get("total_tokens") or 0)
        for call in message.get("tool_calls") or ():
            call["id"], call["function"]["name"], call["function"]["arguments"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    kept = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept, choice.get("finish_reason") == "length", used


def read_seconds(text: str, otherwise: float) -> float:
    """Return a header's number of seconds."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return otherwise


def say(who: str, text: str) -> None:
    """Print one part of the transcript."""
    sys.stdout.buffer.write(f"[{who}] {text}\n".encode("utf-8", "replace"))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
