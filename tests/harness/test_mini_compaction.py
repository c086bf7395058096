# pyright: basic
"""How the mini harness goes on from a summary."""

import importlib.util

import pytest
from mini_kit import MINI, SUBMIT, TOKENIZER, play, run, shell

from etude.types import FinishReason

LONG = "x" * 300


@pytest.fixture(scope="module")
def mini():
    """The harness as a module, for its words."""
    spec = importlib.util.spec_from_file_location("mini", MINI)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts(record):
    """The text that each call was asked with, and that of its answer."""
    by_id = {}
    for node in record.nodes:
        before = "" if node.parent is None else "".join(by_id[node.parent])
        texts = [
            TOKENIZER.decode(list(ids), skip_special_tokens=False)
            for ids in (node.prompt_ids, node.completion.token_ids)
        ]
        by_id[node.node_id] = (before + texts[0], texts[1])
    return list(by_id.values())


async def test_a_conversation_that_passed_the_trigger_goes_on_from_the_summary_word_for_word(tmp_path, mini):
    (tmp_path / "page").write_text(LONG)
    answers = [shell("cat page"), "  the page\nhas x \u00e9 only  ", SUBMIT]
    code, transcript, record = await play(answers, tmp_path, instruction="Read.", compact_at=100)
    assert code == 0, transcript
    first, asked, again = prompts(record)
    assert LONG in asked[0]
    assert asked[0].startswith("".join(first))
    assert mini.SUMMARISE in asked[0]
    assert "the page\nhas x \u00e9 only" in again[0]
    assert "Read.\n" + mini.SO_FAR in again[0]
    assert again[0].startswith(first[0].split("Read.")[0])
    assert LONG not in again[0]
    # What was asked in the summary's turn continues the conversation: none of its tokens was read anew.
    assert record.nodes[1].parent == 0
    assert record.nodes[2].parent is None


async def test_a_second_summary_takes_the_place_of_the_first(tmp_path, mini):
    (tmp_path / "page").write_text(LONG)
    answers = [shell("cat page"), "blue", shell("cat page"), "green", SUBMIT]
    _, _, record = await play(answers, tmp_path, instruction="Read.", compact_at=100)
    last = prompts(record)[-1][0]
    assert last.count(mini.SO_FAR) == 1
    assert "green" in last
    assert "blue" not in last


@pytest.mark.parametrize("compact_at", [None, 0, 100_000])
async def test_below_the_trigger_and_without_one_nothing_is_summarised(tmp_path, compact_at):
    (tmp_path / "page").write_text(LONG)
    _, _, record = await play([shell("cat page"), SUBMIT], tmp_path, compact_at=compact_at)
    assert len(record.nodes) == 2
    assert record.nodes[1].parent == 0


async def test_an_overflow_is_summarised_without_the_turns_that_did_not_fit(tmp_path):
    (tmp_path / "page").write_text(LONG)
    answers = [shell("true"), shell("cat page"), "nothing yet", SUBMIT]
    code, transcript, record = await play(answers, tmp_path, compact_at=550, context_length=600)
    assert code == 0, transcript
    assert record.truncated == ""
    asked, again = prompts(record)[2:]
    assert LONG not in asked[0]
    assert "nothing yet" in again[0]
    assert record.nodes[2].parent == 0


async def test_an_overflow_without_compaction_ends_the_attempt(tmp_path):
    (tmp_path / "page").write_text(LONG)
    code, transcript, record = await play([shell("cat page")], tmp_path, context_length=500)
    assert (code, record.truncated) == (3, "context")
    assert "context_length_exceeded" in transcript


async def test_an_instruction_that_does_not_fit_ends_the_attempt(tmp_path):
    code, transcript, _ = await play([], tmp_path, instruction=LONG, compact_at=100, context_length=300)
    assert code == 3
    assert "the first prompt does not fit" in transcript


async def test_a_tool_that_is_called_in_place_of_a_summary_is_not_used(tmp_path, mini):
    (tmp_path / "page").write_text(LONG)
    code, transcript, record = await play([shell("cat page"), shell("touch never"), SUBMIT], tmp_path, compact_at=100)
    assert code == 0, transcript
    assert not (tmp_path / "never").exists()
    assert prompts(record)[2][0].rpartition(mini.SO_FAR)[2].startswith("\n<|im_end|>")


async def test_calls_and_tokens_of_the_whole_chain_count_against_the_limits(tmp_path):
    (tmp_path / "page").write_text(LONG)
    answers = [shell("cat page"), "one"] * 5
    code, _, record = await play(answers, tmp_path, compact_at=100, max_calls=5)
    assert (code, record.truncated, len(record.nodes)) == (3, "calls", 5)
    code, _, record = await play(answers, tmp_path, compact_at=100, max_session_tokens=100)
    assert (code, record.truncated) == (3, "session_tokens")
    assert sum(len(node.completion.token_ids) for node in record.nodes) <= 100
    assert record.nodes[-1].completion.finish_reason is FinishReason.LENGTH


async def test_it_stops_when_its_turns_are_used_up_by_summaries_too(tmp_path):
    (tmp_path / "page").write_text(LONG)
    answers = [shell("cat page"), "one"] * 5
    assert (await play(answers, tmp_path, "--max-turns", "3", compact_at=100))[0] == 5


async def test_a_trigger_that_is_no_number_is_explained(tmp_path):
    code, transcript = await run("go", cwd=tmp_path, compact_at="soon")
    assert code == 2
    assert "ETUDE_COMPACTION_TRIGGER_TOKENS" in transcript
