# pyright: basic
"""Demonstrations are what the policy meets in the sandbox, byte for byte."""

import asyncio
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

from etude.config import RunConfig
from etude.gateway.doubles import ScriptedSampler
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.runtime.corpus import RENDERER, family_tokenizer, sft_rows
from etude.runtime.task_sets import training_problems
from etude.tasks import pyfix, pyfix_corpus
from etude.tasks.harbor import load_task
from etude.types import SamplingParams

HARNESS = Path(__file__).parents[2] / "harnesses" / "mini" / "mini.py"


async def test_a_demonstration_has_the_ids_that_the_gateway_captures_from_the_harness(tmp_path):
    config = RunConfig.model_validate(
        {
            "tasks": {"family": "pyfix", "num_train": 1, "num_heldout": 1},
            "sft": {"demonstrations": 1, "epochs": 1, "good_share": 1.0},
        }
    )
    tokenizer = family_tokenizer(list(islice(pyfix.problems("corpus"), 50)), 500, pyfix_corpus)
    renderer = ChatMLRenderer(tokenizer, RENDERER)
    [[demonstration]] = sft_rows(config, renderer)
    [problem] = training_problems(config)
    task = load_task(pyfix.write_task(problem, tmp_path))
    (tmp_path / f"{problem.module}.py").write_text("\n".join(problem.broken) + "\n")
    [messages] = pyfix_corpus.demonstrations([problem], seed="0", good_share=1.0)
    answers = [renderer.answer(message) for message in messages if message["role"] == "assistant"]
    gateway = Gateway(sampler=ScriptedSampler(answers, tokenizer=tokenizer), renderer=renderer, context_length=1000)
    await gateway.start()
    try:
        params = SamplingParams(max_tokens=200)
        spec = SessionSpec(session_id="s", purpose="train", seed=1, params=params, max_calls=9, max_session_tokens=999)
        key = await gateway.open(spec)
        await run_harness(task.instruction, gateway.port, key, tmp_path)
        record = await gateway.close("s")
    finally:
        await gateway.stop()
    captured = [token for node in record.nodes for token in (*node.prompt_ids, *node.completion.token_ids)]
    assert captured == demonstration.token_ids


async def run_harness(instruction, port, key, directory):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(HARNESS), instruction,
        cwd=directory, stdout=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": key},
    )  # fmt: skip
    assert await asyncio.wait_for(process.wait(), 30) == 0
