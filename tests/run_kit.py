# pyright: basic
"""Recipes of runs that take seconds, and `etude` commands in processes of their own."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

FROM_NOTHING = """
stages = ["pretrain", "sft", "eval"]
[policy.shape]
vocab = 400
hidden = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
expert_hidden = 32
context = 512
[tasks]
family = "pyfix"
num_train = 8
num_heldout = 2
[pretrain]
tokens = 10_000
documents = 100
threads = 1
[sft]
demonstrations = 16
epochs = 1
threads = 1
[harness]
max_calls = 2
max_session_tokens = 48
[sampling]
max_tokens = 24
[eval]
attempts = 1
"""

COIN = """
stages = ["eval", "train", "eval"]
[policy]
path = "{policy}"
[tasks]
train = "{tasks}/train"
heldout = "{tasks}/heldout"
[harness]
command = ["python3", "-I", "-S", "/opt/harness/once.py", "{{instruction}}"]
files = "{harness}"
[sampling]
max_tokens = 16
[[pools]]
name = "exact"
[[pools]]
name = "rounded"
view = "fp8"
[rollout]
group_size = 4
groups_per_step = 2
max_staleness = 1
[trainer]
steps = 6
[checkpoint]
every = 2
[eval]
attempts = 2
"""
"""Tasks that any policy passes about every second time."""

ONCE = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
open("answer.txt", "w").write(json.dumps(message))
"""
"""An agent that asks once and keeps the answer."""

TEST = """#!/bin/sh
if [ $(( $(wc -c < /app/answer.txt) % 2 )) = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""

TASK = """schema_version = "1.4"
[task]
name = "coin/{0}"
[environment]
network_mode = "no-network"
[verifier]
environment_mode = "separate"
"""


class Command:
    """A running `etude` command whose lines are read as JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        self.process = process
        self.lines = process.stdout
        self.events: list[dict] = []
        self.errors = ""

    async def until(self, **wanted: object) -> None:
        """Read events until one has these values."""
        async for line in self.lines:
            self.events.append(json.loads(line))
            if wanted.items() <= self.events[-1].items():
                return
        pytest.fail(f"ended before {wanted} with exit code {await self.end()}: {self.errors}")

    async def until_step(self, step: int) -> None:
        await self.until(event="step", step=step)

    async def end(self) -> int:
        output, errors = await self.process.communicate()
        self.events += map(json.loads, output.splitlines())
        self.errors = errors.decode()
        return await self.process.wait()

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.events if event["event"] == "step"]

    @property
    def notes(self) -> str:
        return "\n".join(event["text"] for event in self.events if event["event"] == "note")


async def start(command: str, recipe: Path, directory: Path, *settings: str) -> Command:
    overrides = [part for setting in (f"run.url={directory}", *settings) for part in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "etude.cli.main", command, str(recipe), "--json", *overrides),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ETUDE_MARK": str(directory)},
    )
    return Command(process)


def processes_of(directory: Path) -> dict[int, str]:
    """Command lines, by process id, of all processes that descend from a command on this run directory."""
    found = {}
    mark = f"ETUDE_MARK={directory}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


async def gone(directory: Path) -> None:
    async with asyncio.timeout(30):
        while processes_of(directory):  # noqa: ASYNC110 the kernel tells nobody when a foreign process is gone
            await asyncio.sleep(0.05)
