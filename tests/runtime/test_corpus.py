# pyright: basic
"""What the policy learns from looks exactly like what it will be asked."""

import importlib.util
import json

import pytest

from etude.config import HarnessSection, RunConfig
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.rollout.harness import harness_directory
from etude.runtime import corpus
from etude.runtime.task_sets import training_problems
from etude.tasks import mini_talk, pyfix_corpus
from etude.tasks.pyfix import instruction

CONFIG = RunConfig.model_validate(
    {
        "tasks": {"family": "pyfix", "num_train": 30, "num_heldout": 5},
        "pretrain": {"documents": 100, "tokens": 20_000, "batch_tokens": 1024},
        "sft": {"demonstrations": 40, "epochs": 2, "good_share": 0.5, "batch_tokens": 1024},
    }
)


@pytest.fixture(scope="module")
def mini():
    """The built-in harness's program, as a module."""
    spec = importlib.util.spec_from_file_location("mini", harness_directory(HarnessSection()) / "mini.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.family_tokenizer(corpus.corpus_problems(CONFIG), 512, pyfix_corpus)


def test_demonstrations_begin_with_what_the_harness_sends(mini, tokenizer):
    renderer = ChatMLRenderer(tokenizer, corpus.RENDERER)
    prompts = {
        tuple(
            renderer.render(
                [{"role": "system", "content": mini.SYSTEM}, {"role": "user", "content": instruction(problem)}],
                mini.TOOLS,
            )
        )
        for problem in training_problems(CONFIG)
    }
    rows = corpus.sft_rows(CONFIG, renderer)
    for document in (document for row in rows for document in row):
        start = document.learned.index(True)
        assert tuple(document.token_ids[:start]) in prompts


def test_only_answers_are_learned_and_each_ends_its_turn(tokenizer):
    renderer = ChatMLRenderer(tokenizer, corpus.RENDERER)
    [end] = renderer.stop_token_ids
    for row in corpus.sft_rows(CONFIG, renderer):
        for ids, learned in row:
            runs = "".join("x" if one else " " for one in learned).split()
            ends = [place for place, token in enumerate(ids) if token == end and learned[place]]
            assert len(ends) == len(runs) >= 2
            assert ends[-1] == len(ids) - 1


def called(message):
    return [call["function"] for call in message["tool_calls"]]


def test_answers_read_back_as_the_tool_calls_that_were_demonstrated(tokenizer):
    renderer = ChatMLRenderer(tokenizer, corpus.RENDERER)
    problems = training_problems(CONFIG)
    for messages in pyfix_corpus.demonstrations(problems, seed="x", good_share=0.5):
        for message in messages:
            if message["role"] == "assistant":
                assert called(renderer.parse(renderer.answer(message))) == called(message)


def test_a_command_without_output_is_shown_as_the_harness_shows_it(mini):
    options = {"--timeout": 10, "--max-output": 1000}
    assert mini.use_tool({"name": "shell", "arguments": '{"command": "true"}'}, options) == mini_talk.DONE


def test_a_listing_is_shown_as_the_harness_shows_it(mini, tmp_path):
    problem = training_problems(CONFIG)[0]
    (tmp_path / "m.py").write_text("\n".join(problem.broken) + "\n")
    call = {"name": "shell", "arguments": f'{{"command": "cat -n {tmp_path}/m.py"}}'}
    shown = mini.use_tool(call, {"--timeout": 10, "--max-output": 4000})
    [messages] = pyfix_corpus.demonstrations([problem], seed="x", good_share=1.0)
    assert next(message["content"] for message in messages if message["role"] == "tool") == shown


def commands(messages):
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [json.loads(call["arguments"])["command"] for call in calls if call["name"] == "shell"]


def test_demonstrations_are_good_in_the_share_that_was_asked_for():
    problems = training_problems(RunConfig.model_validate({"tasks": {"family": "pyfix", "num_train": 300}}))
    for share in (0.0, 0.4, 1.0):
        made = pyfix_corpus.demonstrations(problems, seed="x", good_share=share)
        good = sum(problem.repair in commands(messages) for problem, messages in zip(problems, made, strict=True))
        assert good / 300 == pytest.approx(share, abs=0.08)


def test_pretraining_has_as_many_tokens_as_asked_and_is_the_same_for_a_seed(tokenizer):
    problems = corpus.corpus_problems(CONFIG)
    rows = corpus.pretrain_rows(CONFIG, problems, tokenizer)
    tokens = sum(len(document.token_ids) for row in rows for document in row)
    assert CONFIG.pretrain.tokens <= tokens < CONFIG.pretrain.tokens + 2 * CONFIG.pretrain.batch_tokens
    assert corpus.pretrain_rows(CONFIG, problems, tokenizer) == rows
