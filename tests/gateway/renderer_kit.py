# pyright: basic, reportArgumentType=false
"""What the tests of renderers share: a tokenizer with every family's tokens, and random conversations."""

import json

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.renderers.deepseek import DeepSeekFormat
from etude.gateway.renderers.family import FormatRenderer
from etude.gateway.renderers.kimi import KimiFormat
from etude.gateway.renderers.llama import LlamaFormat
from etude.gateway.renderers.qwen3 import Qwen3Format

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|python_tag|>",
    *DeepSeekFormat().tokens,
    *(token for token in KimiFormat.tokens if token != "<|im_end|>"),
    *LlamaFormat.tokens,
)
MERGES = [("a", "b"), ("Ċ", "Ċ"), ("Ġ", "a"), ("e", "r"), ("{", '"'), (":", "Ġ"), ("}", "}"), ("u", "s"), ("us", "er")]
TOOLS = [
    {"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "submit", "description": "Hand é in.", "parameters": {}}},
]


def tokenizer_with(specials=SPECIALS, tags=TAGS):
    """Return a byte-level tokenizer that merges line breaks, as the families' do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(specials)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tags])
    return tokenizer


TOKENIZER = tokenizer_with()
RENDERERS = {
    "chatml": ChatMLRenderer(TOKENIZER),
    "smollm2": ChatMLRenderer(TOKENIZER, "smollm2"),
    "qwen3": FormatRenderer(TOKENIZER, Qwen3Format()),
    "qwen3-keep": FormatRenderer(TOKENIZER, Qwen3Format(keep=True)),
    "qwen3-thinking": FormatRenderer(TOKENIZER, Qwen3Format(opens_reasoning=True)),
    "deepseek-v3": FormatRenderer(TOKENIZER, DeepSeekFormat()),
    "deepseek-v3.1": FormatRenderer(TOKENIZER, DeepSeekFormat(newer=True)),
    "kimi-k2": FormatRenderer(TOKENIZER, KimiFormat()),
    "llama-3": FormatRenderer(TOKENIZER, LlamaFormat()),
    "qwen3-no-thinking": FormatRenderer(TOKENIZER, Qwen3Format(closes_reasoning=True)),
    "deepseek-r1-keep": FormatRenderer(TOKENIZER, DeepSeekFormat(thinking=True, keep=True)),
    "deepseek-v3.1-thinking-keep": FormatRenderer(TOKENIZER, DeepSeekFormat(newer=True, thinking=True, keep=True)),
    "kimi-k2-thinking": FormatRenderer(TOKENIZER, KimiFormat(thinking=True)),
    "kimi-k2-thinking-keep": FormatRenderer(TOKENIZER, KimiFormat(thinking=True, keep=True)),
}
OPENING = {"qwen3-thinking", "deepseek-r1-keep", "deepseek-v3.1-thinking-keep"}
"""Renderers whose prompts begin the reasoning."""
REASONING = OPENING | {"chatml", "smollm2", "qwen3", "qwen3-keep", "kimi-k2-thinking", "kimi-k2-thinking-keep"}
"""Renderers of families that reason."""

hostile = st.lists(
    st.sampled_from([*SPECIALS[:3], *SPECIALS[-6:], *TAGS, "user\n", "a", "ab", "\n", "\n\n", "é", "\u2028", "\ufdd0"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    max_size=8,
).map("".join)
plain = st.text("ab é.\n{}", max_size=10).map(str.strip)


def call(name, arguments, number=0):
    """Return a tool call in OpenAI's shape, with the name that Kimi gives it."""
    told = {"name": name, "arguments": arguments}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": told}


arguments = st.dictionaries(st.text("ab", max_size=3), plain | st.integers() | st.lists(plain, max_size=2), max_size=3)
spellings = st.builds(
    lambda value, loose: json.dumps(value, ensure_ascii=loose, separators=(",", ": ") if loose else (" , ", " :")),
    arguments,
    st.booleans(),
)
calls = st.lists(st.tuples(st.sampled_from(["shell", "submit"]), spellings), max_size=3).map(
    lambda told: [call(name, text, number) for number, (name, text) in enumerate(told)]
)


@st.composite
def answers(draw, *, reasons, both=True):
    """Draw an assistant message as the families write them: trimmed text, reasoning without blank ends, calls."""
    told = draw(calls)
    message = {"role": "assistant", "content": draw(plain) if both or not told else ""}
    reasoning = draw(plain) if reasons else ""
    if reasoning:
        message["reasoning_content"] = reasoning
    if told:
        message["tool_calls"] = told
    return message


@st.composite
def tails(draw, words=hostile):
    """Draw what a harness may send after an answer: results of tools, questions, notes of the system."""
    roles = draw(st.lists(st.sampled_from(["tool", "tool", "user", "system"]), min_size=1, max_size=3))
    return [
        {"role": role, "content": draw(words)} | ({"tool_call_id": "functions.shell:0"} if role == "tool" else {})
        for role in roles
    ]
