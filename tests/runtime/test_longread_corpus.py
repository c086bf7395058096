# pyright: basic
"""Chains that are demonstrated are what the policy meets in the sandbox, byte for byte."""

import asyncio
import importlib.util
import os
import subprocess
import sys
from itertools import islice, pairwise

import pytest

from etude.config import HarnessSection, RunConfig
from etude.gateway.doubles import ScriptedSampler
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.rollout.harness import harness_directory, harness_variables
from etude.runtime.corpus import RENDERER, corpus_problems, family_tokenizer, pretrain_rows, sft_rows
from etude.runtime.task_sets import training_problems
from etude.tasks import longread, longread_corpus, mini_talk
from etude.types import SamplingParams

TRIGGER = 48
MINI = harness_directory(HarnessSection()) / "mini.py"


def config(good_share=1.0, trigger=TRIGGER, demonstrations=1):
    return RunConfig.model_validate(
        {
            "tasks": {"family": "longread", "num_train": 40, "num_heldout": 2},
            "harness": {"compaction": {"trigger_tokens": trigger}},
            "pretrain": {"documents": 60, "tokens": 4000, "batch_tokens": 1024},
            "sft": {"demonstrations": demonstrations, "epochs": 1, "good_share": good_share, "batch_tokens": 100_000},
        }
    )


@pytest.fixture(scope="module")
def tokenizer():
    problems = list(islice(longread.problems("corpus"), 60))
    return family_tokenizer(problems, 704, longread_corpus)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatMLRenderer(tokenizer, RENDERER)


def chains(count, good_share):
    """Problems with the conversations of a demonstration each."""
    for problem in training_problems(config())[:count]:
        made = longread_corpus.demonstrations(
            [problem], seed=problem.trail, good_share=good_share, is_full=lambda _: True
        )
        yield problem, list(made)


async def test_a_demonstrated_chain_has_the_ids_that_the_gateway_captures_from_the_harness(
    tokenizer, renderer, tmp_path
):
    problem = training_problems(config())[0]
    for name, text in problem.notes.items():
        (tmp_path / name).write_text(text)
    [documents] = sft_rows(config(), renderer)
    made = longread_corpus.demonstrations([problem], seed="0", good_share=1.0, is_full=lambda _: True)
    answers = [renderer.answer(message) for window in made for message in window if message["role"] == "assistant"]
    sampler = ScriptedSampler(answers, tokenizer=tokenizer)
    record = await play(renderer, sampler, longread.instruction(problem), tmp_path)
    captured, learned = [], []
    for node in record.nodes:
        if node.parent is None:
            captured.append([])
            learned.append([])
        captured[-1] += [*node.prompt_ids, *node.completion.token_ids]
        learned[-1] += [False] * len(node.prompt_ids) + [True] * len(node.completion.token_ids)
    assert sorted(zip(captured, learned, strict=True)) == sorted(documents)
    assert (tmp_path / "answer.txt").read_text() == f"code {problem.code} end {problem.end}\n"


async def play(renderer, sampler, instruction, directory):
    gateway = Gateway(sampler=sampler, renderer=renderer, context_length=256)
    await gateway.start()
    try:
        params = SamplingParams(max_tokens=40)
        spec = SessionSpec(session_id="s", purpose="train", seed=1, params=params, max_calls=99, max_session_tokens=999)
        key = await gateway.open(spec)
        section = HarnessSection.model_validate({"compaction": {"trigger_tokens": TRIGGER}})
        variables = harness_variables(section, url=f"http://127.0.0.1:{gateway.port}/v1", key=key)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(MINI), instruction,
            cwd=directory, stdout=subprocess.DEVNULL, env={"PATH": os.environ["PATH"], **variables},
        )  # fmt: skip
        assert await asyncio.wait_for(process.wait(), 60) == 0
        return await gateway.close("s")
    finally:
        await gateway.stop()


def test_what_the_harness_says_is_what_demonstrations_say():
    spec = importlib.util.spec_from_file_location("mini", MINI)
    assert spec
    assert spec.loader
    mini = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mini)
    names = ("SYSTEM", "SUMMARISE", "SO_FAR")
    assert [getattr(mini, name) for name in names] == [getattr(mini_talk, name) for name in names]


def test_a_task_needs_at_least_eight_contexts_and_each_window_fits_one(renderer):
    shape = 256
    [windows] = sft_rows(config(demonstrations=10), renderer)
    assert max(len(window.token_ids) for window in windows) <= shape
    [whole] = sft_rows(config(trigger=0, demonstrations=10), renderer)
    assert len(whole) == 10
    assert min(len(document.token_ids) for document in whole) >= 8 * shape


def said_last(window):
    return window[-1]["content"]


def test_careful_chains_end_in_the_answer_and_careless_ones_mostly_do_not():
    for problem, windows in chains(20, 1.0):
        assert windows[-1][-1] == longread_corpus.called(
            ("shell", {"command": longread.write_answer(problem.code, problem.end)}), ("submit", {})
        )
    right = sum(f"echo code {problem.code} " in str(windows[-1][-1]) for problem, windows in chains(40, 0.0))
    assert 0 < right < 20


def test_a_summary_is_the_beginning_of_the_next_conversation_word_for_word():
    for _, windows in chains(10, 0.5):
        assert len(windows) == longread.NUM_NOTES + 1
        for window, following in pairwise(windows):
            assert str(following[0]["content"]).endswith(f"{mini_talk.SO_FAR}\n{said_last(window)}")


def test_pretraining_learns_answers_and_not_what_notes_say_at_random(tokenizer):
    rows = pretrain_rows(config(), corpus_problems(config()), tokenizer)
    *_, last = (document for row in rows for document in row)
    assert any(last.learned)
    assert not all(last.learned)
