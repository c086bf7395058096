# pyright: basic
"""The mini harness as a process of its own, against a real gateway over a scripted sampler."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.rollout.harness import COMPACTION_TRIGGER
from etude.types import SamplingParams

MINI = Path(__file__).parents[2] / "harnesses" / "mini" / "mini.py"
TOKENIZER = byte_tokenizer()
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'


def shell(command):
    return f'<tool_call>{{"name": "shell", "arguments": {{"command": {json.dumps(command)}}}}}</tool_call>'


async def run(*arguments, cwd, url="http://127.0.0.1:9/v1", key="k", compact_at=None):
    """Return exit code and transcript."""
    env = {"PATH": os.environ["PATH"], "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    if compact_at is not None:
        env[COMPACTION_TRIGGER] = str(compact_at)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(MINI), *arguments, cwd=cwd, env=env, stdout=-1, stderr=-2
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode()


@asynccontextmanager
async def gateway(answers, *, context_length=20_000, **fields):
    served = Gateway(
        sampler=ScriptedSampler(answers, tokenizer=TOKENIZER),
        renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"),
        context_length=context_length,
    )
    await served.start()
    limits = {"max_calls": 20, "max_session_tokens": 10_000, **fields}
    params = SamplingParams(max_tokens=1000)
    spec = SessionSpec(session_id="s", purpose="train", seed=0, params=params, **limits)
    try:
        yield served, f"http://127.0.0.1:{served.port}/v1", await served.open(spec)
    finally:
        await served.stop()


async def play(answers, tmp_path, *options, instruction="Fix the module.", compact_at=None, **fields):
    async with gateway(answers, **fields) as (served, url, key):
        code, transcript = await run(*options, instruction, cwd=tmp_path, url=url, key=key, compact_at=compact_at)
        return code, transcript, await served.close("s")


def results(record):
    return [message["content"] for message in record.messages if message["role"] == "tool"]
