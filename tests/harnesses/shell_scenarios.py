# pyright: basic
"""What every agent with a shell is put through, and how a policy speaks to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness_kit import REPAIR_COMMAND, TEST_COMMAND, Once, Session, Stage, script

from etude.errors import SamplerError, VersionUnavailableError
from etude.gateway.doubles import Prompt, tool_call

LOOK = "git log --oneline; ls"
MALFORMED = '<tool_call>{"name": "shell", "arguments": {"command": "ls"</tool_call>'
FLOOD = "seq 5000"
SUMMARY = "Words of a title are split at single spaces in textkit/slugs.py; nothing is repaired yet."


@dataclass(frozen=True, kw_only=True)
class Voice:
    """How a policy speaks to a harness."""

    tool: str
    """The tool that runs a command."""
    end: str
    """The answer that ends the session."""

    def run(self, *commands: str) -> str:
        """Return calls of the shell, in parallel if there are several."""
        return "".join(tool_call(self.tool, {"command": command}) for command in commands)


SUBMITS = Voice(tool="shell", end=tool_call("submit", {}))
ECHOES = Voice(tool="bash", end=tool_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))


def repaired(voice: Voice, *, first: str | Callable[[Prompt], str] = "") -> Callable[[Prompt], str]:
    """Return a policy that looks, repairs, tests and ends."""
    return script(first or voice.run(LOOK), voice.run(REPAIR_COMMAND), voice.run(TEST_COMMAND), voice.end)


def malformed_once(voice: Voice) -> Callable[[Prompt], str]:
    """Return a policy whose second answer is a broken call, and that repairs if it is told so."""
    seen: list[Prompt] = []

    def answer(prompt: Prompt) -> str:
        if prompt.num_answers == 0:
            return voice.run(LOOK)
        seen.append(prompt)
        return MALFORMED if len(seen) == 1 else voice.run(REPAIR_COMMAND) if len(seen) == 2 else voice.end

    return answer


def flooded(voice: Voice) -> Callable[[Prompt], str]:
    """Return a policy that fills its context before it does the task, and goes on from a summary of its own."""
    work = (voice.run(REPAIR_COMMAND), voice.end)

    def answer(prompt: Prompt) -> str:
        if "Summarise" in prompt.turns[-1].text:
            return SUMMARY
        if any(SUMMARY in turn.text for turn in prompt.turns if turn.role == "user"):
            return work[min(prompt.num_answers, len(work) - 1)]
        return voice.run(LOOK) if prompt.num_answers == 0 else voice.run(FLOOD)

    return answer


async def play(stage: Stage, voice: Voice) -> Mapping[str, Session]:
    """Play every session and return them by name."""
    plan = repaired(voice)
    three = script(voice.run(LOOK, REPAIR_COMMAND, TEST_COMMAND), voice.end)
    busy = Once(SamplerError("every sampler is away"), Once(VersionUnavailableError("not there yet"), voice.run(LOOK)))
    return {
        "repair": await stage.play(plan),
        "parallel calls": await stage.play(three),
        "busy twice": await stage.play(repaired(voice, first=busy)),
        "cut off": await stage.play(plan, cut=(1,)),
        "malformed call": await stage.play(malformed_once(voice)),
        "overflow": await stage.play(flooded(voice), context_length=8000),
        "out of calls": await stage.play(plan, max_calls=2),
        "out of tokens": await stage.play(plan, max_session_tokens=100),
        "closed": await stage.play(plan, close_before=3),
    }
