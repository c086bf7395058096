# pyright: basic
"""What a model says to Codex: scripts of sessions, and what there is to know about its prompts."""

import re

from harness_kit import FAULT, REPAIR, REPAIRED, TEST_COMMAND, Once, harness_of, script

from etude.errors import SamplerError
from etude.gateway.doubles import tool_call

NAME = "codex"
HARNESS = harness_of(NAME)
PATCH = f"*** Begin Patch\n*** Update File: {REPAIRED}\n@@\n-    {FAULT}\n+    {REPAIR}\n*** End Patch"
SUMMARY = "The tests of textkit fail because slug splits at single blanks. Next: repair textkit/slugs.py."
FINDINGS = {
    "thoroughly": "The fault is in textkit/slugs.py, which splits at every single blank.",
    "fast": "It is slug, which keeps empty words between two blanks.",
}
# The byte tokenizer makes a token of every character, so its prompts are four times as long as those of a real one.
WINDOW = {"COMPACT_AT_TOKENS": "1000000"}


def run(command):
    return tool_call("exec_command", {"cmd": command})


def patch():
    return tool_call("apply_patch", {"input": PATCH})


def repairs(*, busy=False):
    """Read and test at once, repair, test again; with `busy`, the model is away when it is first asked to repair."""
    look = f"<think>\nFirst I look.\n</think>\n\nI look. {run(f'cat {REPAIRED}')}{run(TEST_COMMAND)}"
    repair = Once(SamplerError("away"), patch()) if busy else patch()
    return script(look, repair, run(TEST_COMMAND), "The tests pass.")


def delegates():
    """Two sub-agents at once, waited for one after the other."""

    def wait(prompt, number):
        started = re.findall(r'"agent_id":"([^"]+)"', "\n".join(turn.text for turn in prompt.turns))
        return tool_call("multi_agent_v1__wait_agent", {"targets": [started[number]], "timeout_ms": 60_000})

    def answer(prompt):
        asked = [turn.text for turn in prompt.turns if turn.role == "user"]
        if asked[-1].startswith("Look for the fault"):
            return run(f"cat {REPAIRED}")
        if any(text.startswith("Look for the fault") for text in asked):
            return next(said for how, said in FINDINGS.items() if how in "".join(asked))
        tasks = [f"Look for the fault, {how}." for how in FINDINGS]
        both = "".join(tool_call("multi_agent_v1__spawn_agent", {"message": task}) for task in tasks)
        steps = (both, lambda: wait(prompt, 0), lambda: wait(prompt, 1), patch(), run(TEST_COMMAND), "The tests pass.")
        step = steps[prompt.num_answers]
        return step if isinstance(step, str) else step()

    return answer


def fills_up(*, size, most=40):
    """Read until Codex asks for a summary, and repair after it."""

    def answer(prompt):
        if "CONTEXT CHECKPOINT COMPACTION" in prompt.turns[-1].text:
            return SUMMARY
        told = "\n".join(turn.text for turn in prompt.turns[1:])
        if SUMMARY in told:
            steps = (patch(), run(TEST_COMMAND), "The tests pass.")
            return steps[min(2, told.rpartition(SUMMARY)[2].count("<tool_response>"))]
        assert prompt.num_answers < most, "nobody asked for a summary"
        return run(f"head -c {size} /dev/zero | tr '\\0' '{'abcdefghij'[prompt.num_answers % 10]}'")

    return answer


def plans():
    """Return, by name, what the model says in a session and how the session is played."""
    return {
        "repair": (repairs(), {}),
        "busy and cut off": (repairs(busy=True), {"cut": (3,)}),
        "sub-agents": (delegates(), {}),
        "compaction": (fills_up(size=6000), {"env": {"COMPACT_AT_TOKENS": "40000"}}),
        "out of calls": (repairs(), {"max_calls": 2}),
        "out of tokens": (repairs(), {"max_session_tokens": 300}),
    }


async def play(on_stage):
    """Play every session and return them by name, as `shell_scenarios.play` does."""
    return {name: await on_stage.play(answer, **in_window(options)) for name, (answer, options) in plans().items()}


def in_window(options):
    """Return how a session is played whose context is the model's unless it says otherwise."""
    return {**options, "env": {**WINDOW, **options.get("env", {})}}
