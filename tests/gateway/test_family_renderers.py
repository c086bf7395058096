# pyright: basic, reportArgumentType=false
import json
import re
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderer_kit import (
    OPENING,
    REASONING,
    RENDERERS,
    SPECIALS,
    TAGS,
    TOKENIZER,
    TOOLS,
    answers,
    call,
    hostile,
    tails,
    tokenizer_with,
)

from etude.errors import PolicyError
from etude.gateway.renderers.deepseek import ASSISTANT, DeepSeekFormat
from etude.gateway.renderers.family import FormatRenderer
from etude.gateway.renderers.qwen3 import Qwen3Format
from etude.gateway.renderers.vocabulary import Frame, Vocabulary

FEW = settings(max_examples=20)
EACH = pytest.mark.parametrize("name", RENDERERS)
SYSTEM, QUESTION = {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}
SPECIAL_IDS = {TOKENIZER.token_to_id(token) for token in (*SPECIALS, *TAGS)}


def shown(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def spoken(name):
    return answers(reasons=name in REASONING, both=name != "llama-3")


def meaning(message):
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message.get("reasoning_content") or "", message.get("content") or "", calls


@EACH
@FEW
@given(data=st.data())
def test_what_an_answer_says_is_what_is_read_from_its_tokens(name, data):
    said = data.draw(spoken(name))
    read = RENDERERS[name].parse(RENDERERS[name].answer(said))
    assert meaning(read) == meaning(said)
    assert "tool_parse_error" not in read


@EACH
@FEW
@given(data=st.data())
def test_extending_what_was_drawn_gives_what_rendering_at_once_gives(name, data):
    renderer, messages = RENDERERS[name], [SYSTEM, QUESTION]
    tools = data.draw(st.sampled_from([[], TOOLS]))
    ids = renderer.render(messages, tools)
    for _ in range(data.draw(st.integers(1, 4))):
        said, tail = data.draw(spoken(name)), data.draw(tails())
        extension = renderer.extend(tail, finished=True)
        ids += renderer.answer(said)
        messages = [*messages, said, *tail]
        # An answer without the reasoning that its prompt began is spelled without that beginning later on.
        if extension is None or (name in OPENING and "reasoning_content" not in said):
            return
        ids += extension
        assert ids == renderer.render(messages, tools)


@EACH
@FEW
@given(ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 3) | st.sampled_from(sorted(SPECIAL_IDS)), max_size=60))
def test_whatever_is_drawn_can_be_read_and_the_parts_are_all_of_it(name, ids):
    renderer = RENDERERS[name]
    message = renderer.parse(ids)
    assert message["role"] == "assistant"
    json.dumps(message).encode()
    known = TOKENIZER.get_vocab_size()
    runs = [(fits, list(run)) for fits, run in groupby(ids, lambda token: token < known)]
    text = "".join(shown(run) if fits else "\ufffd" * len(run) for fits, run in runs)
    assert "".join(part.text for part in renderer.parts(ids)) == text


words = st.sampled_from(
    [*TAGS, *SPECIALS, '{"name": "shell", ', '"arguments": {}}', '"parameters": {}}', "function", " "]
)


@EACH
@FEW
@given(
    told=st.lists(words | st.sampled_from(["functions.a:0", "a", "\n```json\n{}\n```", "{}", ";", "\n"]), max_size=12)
)
def test_the_parts_of_torn_tool_calls_are_all_that_was_drawn(name, told):
    text = "".join(told)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert "".join(part.text for part in RENDERERS[name].parts(ids)) == text
    message = RENDERERS[name].parse(ids)
    assert not (message.get("tool_parse_error") and message.get("tool_calls"))


@EACH
@FEW
@given(data=st.data())
def test_no_message_can_write_a_token_of_the_format(name, data):
    renderer = RENDERERS[name]
    tail = data.draw(tails())
    tame = [message | {"content": "x"} for message in tail]
    said = {"role": "assistant", "content": data.draw(hostile)}

    def frame_of(messages, word):
        tools = [{"type": "function", "function": {"name": word or "x", "description": word, "parameters": {}}}]
        return [token for token in renderer.render(messages, tools) if token in SPECIAL_IDS]

    expected = frame_of([QUESTION, said | {"content": "x"}, *tame], "x")
    assert frame_of([QUESTION, said, *tail], data.draw(hostile)) == expected


@EACH
def test_an_answer_that_was_cut_short_gets_its_end_from_the_renderer(name):
    tail = [{"role": "tool", "content": "go on", "tool_call_id": "c"}]
    renderer = RENDERERS[name]
    assert renderer.extend(tail, finished=False) == [
        renderer.stop_token_ids[0],
        *renderer.extend(tail, finished=True),
    ]


@pytest.mark.row("P-53")
@pytest.mark.parametrize("name", ["chatml", "smollm2", "qwen3", "qwen3-keep", "qwen3-thinking"])
def test_the_line_break_after_an_end_of_turn_is_the_renderers_and_never_the_policys(name):
    renderer = RENDERERS[name]
    drawn = renderer.answer({"role": "assistant", "content": "yes", "reasoning_content": "hm"})
    assert shown(drawn).endswith("yes<|im_end|>")
    assert shown(renderer.extend([{"role": "tool", "content": "R"}], finished=True)).startswith("\n<|im_start|>")


@pytest.mark.row("P-55")
def test_a_question_after_reasoning_starts_a_branch_and_a_result_does_not():
    said = {"role": "assistant", "content": "A", "reasoning_content": "why"}
    result, question = {"role": "tool", "content": "R"}, {"role": "user", "content": "U"}
    for name in ("qwen3", "qwen3-thinking"):
        renderer = RENDERERS[name]
        assert renderer.extend([result], finished=True) is not None
        assert renderer.extend([question], finished=True) is None
        assert "why" in shown(renderer.render([QUESTION, said, result], []))
        assert "why" not in shown(renderer.render([QUESTION, said, result, said, question], []))
    kept = RENDERERS["qwen3-keep"]
    assert "why" in shown(kept.render([QUESTION, said, question], []))
    assert kept.extend([question], finished=True) is not None


@pytest.mark.row("P-58")
@pytest.mark.parametrize("name", ["kimi-k2", "llama-3", "qwen3-thinking"])
def test_a_generation_prompt_of_many_tokens_ends_where_the_drawn_ones_begin(name):
    renderer = RENDERERS[name]
    said = {"role": "assistant", "content": "\n\nab", "reasoning_content": "ab"}
    prompt = renderer.render([QUESTION], [])
    whole = renderer.render([QUESTION, said, {"role": "tool", "content": "R", "tool_call_id": "c"}], [])
    assert len(prompt) >= 3
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt) :][: len(renderer.answer(said))] == renderer.answer(said)


def test_qwen3_reads_and_writes_reasoning_that_the_prompt_began():
    renderer = RENDERERS["qwen3-thinking"]
    assert shown(renderer.render([QUESTION], [])).endswith("<|im_start|>assistant\n<think>\n")
    read = renderer.parse(TOKENIZER.encode("hm\n</think>\n\nyes<|im_end|>").ids)
    assert read == {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    unfinished = renderer.parse(TOKENIZER.encode("hm").ids)
    assert unfinished == {"role": "assistant", "reasoning_content": "hm", "content": ""}


def test_qwen3_without_thinking_answers_behind_an_empty_reasoning_that_stays():
    renderer = RENDERERS["qwen3-no-thinking"]
    begun = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert shown(renderer.render([QUESTION], [])).endswith(begun)
    said = {"role": "assistant", "content": "A"}
    assert shown(renderer.render([QUESTION, said, QUESTION], [])).count(begun) == 2
    assert renderer.parse(renderer.answer(said)) == said


def test_kimi_that_thinks_forgets_its_reasoning_once_an_answer_is_final():
    renderer, kept = RENDERERS["kimi-k2-thinking"], RENDERERS["kimi-k2-thinking-keep"]
    look = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call("shell", "{}")]}
    result = {"role": "tool", "content": "R", "tool_call_id": "functions.shell:0"}
    final = {"role": "assistant", "content": "A", "reasoning_content": "so"}
    assert "<think>why</think>" in shown(renderer.render([QUESTION, look, result], []))
    assert shown(renderer.render([QUESTION, look, result, final, QUESTION], [])).count("<think></think>") == 2
    assert renderer.extend([result], finished=True) is not None
    assert renderer.extend([QUESTION], finished=True) is None
    assert shown(kept.render([QUESTION, look, result, final, QUESTION], [])).count("<think></think>") == 0
    assert kept.extend([QUESTION], finished=True) is not None


@pytest.mark.parametrize(
    ("newer", "begun", "earlier"), [(False, "<think>\n", ""), (True, "<think>", "</think>")], ids=["r1", "v3.1"]
)
def test_deepseek_that_thinks_begins_its_reasoning_in_each_prompt_and_branches_at_each_call(newer, begun, earlier):
    renderer = FormatRenderer(TOKENIZER, DeepSeekFormat(newer=newer, thinking=True))
    said = {"role": "assistant", "content": "A", "reasoning_content": "why"}
    text = shown(renderer.render([QUESTION, said, QUESTION], []))
    assert text.endswith(f"{ASSISTANT}{begun}")
    assert f"{ASSISTANT}{earlier}A" in text
    result = {"role": "tool", "content": "R"}
    assert shown(renderer.render([QUESTION, said, result], [])).endswith(begun)
    assert [renderer.extend(tail, finished=True) for tail in ([QUESTION], [result])] == [None, None]


def test_kimis_own_names_of_calls_come_back_with_their_results():
    renderer = RENDERERS["kimi-k2"]
    said = {"role": "assistant", "content": "", "tool_calls": [call("shell", "{}", 7)]}
    (read,) = renderer.parse(renderer.answer(said))["tool_calls"]
    assert read["id"] == "functions.shell:7"
    result = {"role": "tool", "content": "R", "tool_call_id": read["id"]}
    assert "tool<|im_middle|>## Return of functions.shell:7\nR<|im_end|>" in shown(
        renderer.extend([result], finished=True)
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "shell", "arguments": {}}\n'),
        (
            "kimi-k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>shell<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        (
            "kimi-k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>{"
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("deepseek-v3.1", "<|tool calls begin|><|tool calls end|>"),
        ("deepseek-v3", "<|tool calls begin|><|tool call begin|>function<|tool sep|>a\n{}<|tool call end|>"),
        ("deepseek-v3", "x<|tool call begin|>"),
        ("llama-3", '{"name": "shell", "parameters": {}'),
        ("llama-3", '{"name": "shell", "parameters": {}} and more'),
        ("llama-3", '<|python_tag|>print("x")'),
    ],
)
def test_a_malformed_call_is_text_and_is_flagged(name, text):
    if name.startswith("deepseek"):
        text = re.sub(r"<\|(.*?)\|>", lambda token: "<\uff5c" + token[1].replace(" ", "\u2581") + "\uff5c>", text)
    read = RENDERERS[name].parse(TOKENIZER.encode(text, add_special_tokens=False).ids)
    assert read == {"role": "assistant", "content": text, "tool_parse_error": True}


def test_an_object_that_is_no_call_is_an_answer_of_llama():
    text = '{"answer": 42}'
    assert RENDERERS["llama-3"].parse(TOKENIZER.encode(text).ids) == {"role": "assistant", "content": text}


def test_a_tokenizer_without_a_token_of_the_format_is_refused():
    with pytest.raises(PolicyError, match="no token <think>"):
        FormatRenderer(tokenizer_with(tags=()), Qwen3Format())


@given(
    pieces=st.lists(st.sampled_from(["<|im_start|>user\n", "a", "\n", "<think>", "b", "\n</think>\n\n"]), max_size=8)
)
def test_frames_and_strings_encode_like_their_text_when_nobody_spells_a_token(pieces):
    marked = [Frame(piece) if any(tag in piece for tag in ("<|", "think")) else piece for piece in pieces]
    assert Vocabulary(TOKENIZER).encode(marked) == TOKENIZER.encode("".join(pieces), add_special_tokens=False).ids
