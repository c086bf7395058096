# pyright: basic
"""What a model says to Claude Code: scripts of sessions, and what there is to know about its prompts."""

from harness_kit import FAULT, REPAIR, REPAIRED, TEST_COMMAND, Once, harness_of, script

from etude.errors import SamplerError
from etude.gateway.doubles import tool_call

NAME = "claude-code"
HARNESS = harness_of(NAME)
PATH = f"/app/{REPAIRED}"
SUMMARY = "The tests of textkit fail because slug splits at single blanks. Next: repair textkit/slugs.py."
FINDINGS = {
    "thoroughly": "The fault is in textkit/slugs.py, which splits at every single blank.",
    "fast": "It is slug, which keeps empty words between two blanks.",
    "meanwhile": "The tests want split() where split at a blank stands.",
}
WITH_SEARCH = tuple(part for part in HARNESS.command if "WebSearch" not in part)
# The byte tokenizer makes a token of every character, so its prompts are four times as long as those of a real one.
WINDOW = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "1000000"}


def bash(command):
    return tool_call("Bash", {"command": command})


def read(path=PATH):
    return tool_call("Read", {"file_path": path})


def edit(**more):
    return tool_call("Edit", {"file_path": PATH, "old_string": FAULT, "new_string": REPAIR, **more})


def agent(task, **more):
    return tool_call("Agent", {"description": "Find the fault", "prompt": task, **more})


def repairs(*, busy=False):
    """Read and test at once, repair, test again; with `busy`, the model is away when it is first asked to repair."""
    repair = Once(SamplerError("away"), edit()) if busy else edit()
    return script(f"I look. {read()}{bash(TEST_COMMAND)}", repair, bash(TEST_COMMAND), "The tests pass.")


def tidied():
    """Call tools in the ways that Claude Code changes before it runs them."""
    return script(
        tool_call("Read", {"file_path": PATH, "limit": "3"}),
        tool_call("Write", {"file_path": "/app/notes.txt", "content": "one   \ntwo  \n"}),
        tool_call("Bash", {"command": TEST_COMMAND, "timeout": "9000", "run_in_background": "false"}),
        bash("find . -name '*.txt' -exec rm {} \\\\;"),
        f"<think>\nI know.\n</think>\n\n  Now I repair it. {edit()}",
        tool_call("Bash", {"command": TEST_COMMAND, "nothing": 1}),
        tool_call("Nothing", {}),
        bash(TEST_COMMAND),
        "The tests pass.",
    )


def delegates():
    """Two sub-agents at once, one of them of another model, and one in the background."""

    def answer(prompt):
        asked = next(turn.text for turn in prompt.turns if turn.role == "user")
        if "Look for the fault" in asked:
            finding = next(said for how, said in FINDINGS.items() if how in asked)
            return f"{read()}{bash(TEST_COMMAND)}" if prompt.num_answers == 0 else finding
        both = agent("Look for the fault, thoroughly.", subagent_type="Explore") + agent("Look for the fault, fast.")
        later = agent("Look for the fault, meanwhile.", run_in_background=True)
        # Its note comes with the first result after its end.
        steps = (both, later, read() + bash("sleep 1"), edit(), bash(TEST_COMMAND), "The tests pass.")
        return steps[prompt.num_answers]

    return answer


def searches():
    """Search the web, which Claude Code does by asking the model to play a search engine."""

    def answer(prompt):
        if "performing a web search" in prompt.turns[0].text:
            return "I find nothing."
        return (tool_call("WebSearch", {"query": "python split"}), read(), edit(), "done")[prompt.num_answers]

    return answer


def fills_up(*, size, most=40):
    """Read until Claude Code asks for a summary, and repair after it."""

    def answer(prompt):
        said = prompt.turns[-1].text
        if "Respond with TEXT ONLY" in said:
            return f"<analysis>\nI read and tested.\n</analysis>\n\n<summary>\n{SUMMARY}\n</summary>"
        if any(SUMMARY in turn.text for turn in prompt.turns[1:]):
            if "\nOK" in said:
                return "The tests pass."
            return bash(TEST_COMMAND) if "has been updated" in said else edit() if FAULT in said else read()
        assert prompt.num_answers < most, "nobody asked for a summary"
        return bash(f"head -c {size} /dev/zero | tr '\\0' '{'abcdefghij'[prompt.num_answers % 10]}'")

    return answer


def plans():
    """Return, by name, what the model says in a session and how the session is played."""
    return {
        "repair": (repairs(), {}),
        "busy and cut off": (repairs(busy=True), {"cut": (4,)}),
        "tidied calls": (tidied(), {}),
        "sub-agents": (delegates(), {}),
        "compaction": (fills_up(size=6000), {"env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "112000"}}),
        "overflow": (fills_up(size=6000), {"context_length": 110_000}),
        "out of calls": (repairs(), {"max_calls": 2}),
        "out of tokens": (repairs(), {"max_session_tokens": 300}),
    }


async def play(on_stage):
    """Play every session and return them by name, as `shell_scenarios.play` does."""
    return {name: await on_stage.play(answer, **in_window(options)) for name, (answer, options) in plans().items()}


def in_window(options):
    """Return how a session is played whose context is the model's unless it says otherwise."""
    return {**options, "env": {**WINDOW, **options.get("env", {})}}
