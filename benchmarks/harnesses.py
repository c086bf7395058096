"""What real harnesses do behind the gateway: calls, branches by reason, prefix breaks, and what became of the tokens.

    python benchmarks/harnesses.py [--only NAME ...] [--json FILE]

Each harness runs as it is shipped, in a sandbox, on a repository whose tests fail, against a model with a script; its
sessions are those of tests/harnesses, which say what every one of them must come to. A prefix break is a call that does
not extend the tokens of the call before it although it continues what that one said; a summary is no such call.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from etude.rollout.identity import identify

TESTS = Path(__file__).parents[1] / "tests" / "harnesses"
KITS = {
    "openai-chat": ("shell_scenarios", "SUBMITS"),
    "openai-responses": ("shell_scenarios", "SUBMITS"),
    "anthropic": ("shell_scenarios", "SUBMITS"),
    "mini-swe-agent": ("shell_scenarios", "ECHOES"),
    "claude-code": ("claude_code_kit", ""),
    "codex": ("codex_kit", ""),
}
"""Where each harness's sessions are, and how a policy speaks to it if they are written for several."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What real harnesses do behind the gateway.")
    parser.add_argument("--only", nargs="+", choices=KITS, default=list(KITS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    rows = [asyncio.run(row_of(name)) for name in options.only]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


async def row_of(name: str) -> dict[str, object]:
    """Play a harness's sessions, print its line of the table and return it."""
    kit = import_module("harness_kit")
    if reason := kit.missing(name):
        print(f"{name}: skipped, {reason}", flush=True)
        return {"harness": name, "skipped": reason}
    module, voice = KITS[name]
    scenarios = import_module(module)
    harness = kit.harness_of(name)
    with tempfile.TemporaryDirectory() as directory:
        async with kit.stage(harness, Path(directory)) as on_stage:
            sessions = await scenarios.play(on_stage, *([getattr(scenarios, voice)] if voice else []))
    counted = import_module("harness_table").row(name, list(sessions.values()))
    row = {**counted, "version": identify(harness).version}
    print(
        f"{name} {row['version']}: {row['sessions']} sessions, {row['calls']} calls ({told(row['edges'])}), "
        f"{row['prefix_break_rate']:.2%} prefix breaks; {row['drawn']} tokens drawn = {row['trained']} trained"
        f" + masked ({told(row['masked'])}) + dropped ({told(row['dropped'])})",
        flush=True,
    )
    return row


def told(counts: dict[str, int]) -> str:
    """Return counts by reason as text."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


if __name__ == "__main__":
    main()
