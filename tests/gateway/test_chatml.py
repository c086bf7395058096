# pyright: basic, reportArgumentType=false
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from etude.errors import PolicyError
from etude.gateway.doubles import byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.renderers.registry import load_renderer

TOKENIZER = byte_tokenizer()
RENDERERS = [ChatMLRenderer(TOKENIZER, "chatml"), ChatMLRenderer(TOKENIZER, "chatml-compact")]
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
START = TOKENIZER.token_to_id("<|im_start|>")
END = TOKENIZER.token_to_id("<|im_end|>")

hostile = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "user\n", "</tool_response>", "a", "b", "\n", "é", "\u2028"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    max_size=8,
).map("".join)
incoming = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), hostile
)
tool_call = st.builds(
    lambda name, command: {
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"command": command})},
    },
    st.sampled_from(["shell", "submit"]),
    st.text("abc ", max_size=6),
)
answer = st.builds(
    lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls},
    st.text("abc .", max_size=8).map(str.strip),
    st.lists(tool_call, max_size=2),
)


def shown(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("renderer", RENDERERS)
@given(messages=st.lists(incoming, min_size=1, max_size=5), tool_name=hostile)
def test_no_message_can_open_or_close_a_turn(renderer, messages, tool_name):
    tools = [{"type": "function", "function": {"name": tool_name or "x"}}]
    tame = [{"role": message["role"], "content": "x"} for message in messages]
    ids, expected = renderer.render(messages, tools), renderer.render(tame, TOOLS)
    assert (ids.count(START), ids.count(END)) == (expected.count(START), expected.count(END))


@pytest.mark.parametrize("renderer", RENDERERS)
@given(turns=st.lists(st.tuples(answer, st.lists(incoming, min_size=1, max_size=3)), max_size=4))
def test_a_conversation_extended_turn_by_turn_is_the_same_as_rendered_at_once(renderer, turns):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    ids = renderer.render(messages, TOOLS)
    for spoken, tail in turns:
        ids = ids + renderer.answer(spoken) + renderer.extend(tail, finished=True)
        messages = [*messages, spoken, *tail]
    assert ids == renderer.render(messages, TOOLS)


@pytest.mark.parametrize("renderer", RENDERERS)
@given(spoken=answer)
def test_parsing_what_was_drawn_gives_the_answer_back(renderer, spoken):
    parsed = renderer.parse(renderer.answer(spoken))
    assert (parsed["content"] or "") == spoken["content"]
    assert parsed.get("tool_calls", []) == spoken["tool_calls"]


@pytest.mark.parametrize("renderer", RENDERERS)
def test_an_answer_cut_short_gets_its_end_of_turn_from_the_template(renderer):
    tail = [{"role": "user", "content": "go on"}]
    assert renderer.extend(tail, finished=False) == [END, *renderer.extend(tail, finished=True)]


@pytest.mark.parametrize("renderer", RENDERERS)
@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_any_drawn_ids_parse_to_text_that_is_valid_unicode(renderer, ids):
    parsed = renderer.parse(ids)
    assert parsed["role"] == "assistant"
    (parsed["content"] or "").encode()


def test_broken_utf8_becomes_replacement_characters():
    assert RENDERERS[0].parse([TOKENIZER.encode("é").ids[0], START, 9999, END]) == {
        "role": "assistant",
        "content": "\ufffd<|im_start|>\ufffd",
    }


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "shell", "arguments": {"command": "ls"}',
        '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}}</tool_call>',
        '<tool_call>{"name": "shell", "arguments": "ls"}</tool_call>',
        '<tool_call>{"name": "shell"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "shell", "arguments": {}, "x": 1}</tool_call>',
        '<tool_call>{"name": "shell", "arguments": {"command": NaN}}</tool_call>',
        '<tool_call>{"name": "shell", "arguments": {}}</tool_call> <tool_call>oops</tool_call>',
        'hello {"name": "shell", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "shell", "arguments": {"a": ' + "[" * 5000 + "}</tool_call>",
    ],
)
def test_a_malformed_tool_call_comes_back_as_plain_text_and_is_flagged(text):
    parsed = RENDERERS[1].parse(TOKENIZER.encode(text).ids)
    assert parsed == {"role": "assistant", "content": text, "tool_parse_error": True}


def test_arguments_are_the_characters_that_were_drawn():
    text = 'I look. <tool_call>{"name": "shell", "arguments": {"command" :  "l\\u0073"} }</tool_call>'
    parsed = RENDERERS[1].parse(TOKENIZER.encode(text).ids)
    assert parsed["content"] == "I look."
    assert parsed["tool_calls"] == [
        {"type": "function", "function": {"name": "shell", "arguments": '{"command" :  "l\\u0073"}'}}
    ]


def test_reasoning_is_separated_even_when_it_was_cut_short():
    assert RENDERERS[0].parse(TOKENIZER.encode("<think>\nhm\n</think>\n\nyes").ids) == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "yes",
    }
    assert RENDERERS[0].parse(TOKENIZER.encode("<think>\nhm").ids)["reasoning_content"] == "hm"


def test_qwens_spelling_is_kept_character_for_character():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "tool_calls": [tool("ls")]},
        {"role": "tool", "content": "R1"},
        {"role": "tool", "content": "R2"},
    ]
    text = shown(RENDERERS[0].render(messages, TOOLS))
    assert text.startswith("<|im_start|>system\nS\n\n# Tools\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}\n' in text
    assert text.endswith(
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA\n<tool_call>\n"
        '{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_compact_spelling_names_tools_in_one_line():
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [tool("ls")]},
        {"role": "tool", "content": "R"},
    ]
    assert shown(RENDERERS[1].render(messages, TOOLS)) == (
        "<|im_start|>system\ntools: shell<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nR<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tokenizer_that_makes_special_tokens_of_plain_text_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"<|im_start|>": 0, "<|im_end|>": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    with pytest.raises(PolicyError, match="plain text"):
        ChatMLRenderer(tokenizer)


def test_a_tokenizer_that_changes_text_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(PolicyError, match="byte-level"):
        ChatMLRenderer(tokenizer)


def test_the_model_directory_says_which_renderer_fits(tmp_path: Path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    messages = [{"role": "tool", "content": "R"}]
    assert load_renderer(tmp_path).render(messages, []) == RENDERERS[0].render(messages, [])
    (tmp_path / "etude.json").write_text('{"renderer": "chatml-compact", "other": 1}')
    assert load_renderer(tmp_path).render(messages, []) == RENDERERS[1].render(messages, [])
    assert load_renderer(tmp_path, "chatml").render(messages, []) == RENDERERS[0].render(messages, [])


def test_a_model_directory_that_cannot_be_rendered_is_refused_with_what_is_supported(tmp_path: Path):
    with pytest.raises(PolicyError, match=r"tokenizer\.json"):
        load_renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PolicyError, match="no tokenizer"):
        load_renderer(tmp_path)
    other = Tokenizer(models.BPE())
    other.decoder = decoders.ByteLevel()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PolicyError, match=r"Supported are .*chatml-compact"):
        load_renderer(tmp_path)
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "etude.json").write_text('{"renderer": "llama"}')
    with pytest.raises(PolicyError, match="'llama'"):
        load_renderer(tmp_path)


def tool(command):
    return {"type": "function", "function": {"name": "shell", "arguments": json.dumps({"command": command})}}
