"""Tests of a pyfix task: copied into it as tests/run.py and started by tests/test.sh.

The module under test runs in a child process, as the unprivileged user, and answers over a pipe. The child is forked
before the expected results are read, so it can neither look them up, nor write the reward, nor end the tests early:
what it does not answer right is a failure. Few modules are imported, since this starts once per attempt.
"""

import json
import os
import pwd
import select
import signal
import sys
from time import monotonic

CASES, REWARD, WORKDIR = "/tests/cases.json", "/logs/verifier/reward.json", "/app"
TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20


def answer(questions: int, answers: int) -> None:
    """Become the unprivileged user, and answer each call with a line of JSON."""
    agent = pwd.getpwnam("agent")
    if agent.pw_uid != os.getuid():
        os.setgroups([])
        os.setgid(agent.pw_gid)
        os.setuid(agent.pw_uid)
    os.chdir(WORKDIR)
    with os.fdopen(questions) as source:
        suite = json.loads(source.read())
    sys.path.insert(0, WORKDIR)
    module = __import__(suite["module"])
    for name, arguments in suite["calls"]:
        try:
            line = json.dumps(getattr(module, name)(*arguments))
        except Exception:  # noqa: BLE001 whatever the code under test does wrong is a wrong answer
            line = "raised"
        os.write(answers, line.encode() + b"\n")


def collect(child: int, answers: int) -> list[bytes]:
    """Return the lines that the child wrote until it closed its end, or the time or the space was up."""
    data = b""
    deadline = monotonic() + TIMEOUT_S
    while len(data) < MAX_BYTES and select.select([answers], [], [], max(0.0, deadline - monotonic()))[0]:
        part = os.read(answers, 65536)
        if not part:
            break
        data += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return data.splitlines()


def is_right(line: bytes, expected: object) -> bool:
    """Whether a line of JSON is the expected value, of the same type."""
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return type(value) is type(expected) and value == expected


def main() -> None:
    """Run all cases and write the reward: 1 when every answer is right."""
    question_reader, question_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(question_writer)
        os.close(answer_reader)
        try:
            answer(question_reader, answer_writer)
        finally:
            os._exit(0)
    os.close(question_reader)
    os.close(answer_writer)
    with open(CASES) as file:  # noqa: PTH123 pathlib would double the time to start
        suite = json.load(file)
    cases = suite["cases"]
    calls = [(case["function"], case["arguments"]) for case in cases]
    with os.fdopen(question_writer, "w") as sink:
        sink.write(json.dumps({"module": suite["module"], "calls": calls}))
    lines = collect(child, answer_reader)
    right = sum(is_right(line, case["expected"]) for line, case in zip(lines, cases, strict=False))
    sys.stdout.write(f"{right} of {len(cases)} answers right\n")
    passed = right == len(cases) == len(lines)
    with open(REWARD, "w") as file:  # noqa: PTH123
        file.write(json.dumps({"reward": 1.0 if passed else 0.0}))


if __name__ == "__main__":
    main()
