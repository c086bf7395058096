# pyright: basic, reportArgumentType=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOptionalIterable=false
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderer_kit import REASONING, RENDERERS, SPECIALS, TAGS, TOKENIZER, TOOLS, answers, call, hostile, tails
from template_kit import BOS, OWN, QWEN3, SMOLLM2, TEMPLATES, model_dir

from etude.cli.main import main
from etude.errors import PolicyError
from etude.gateway.refusals import CallRefusedError
from etude.gateway.renderers.chat_template import ChatTemplate
from etude.gateway.renderers.family import FormatRenderer
from etude.gateway.renderers.proof import find_breaks, probes_for
from etude.gateway.renderers.qwen3 import Qwen3Format
from etude.gateway.renderers.registry import choose, load_renderer, prove, read_model_files
from etude.gateway.renderers.report import examine
from etude.gateway.renderers.template import TemplateRenderer

QUESTION = {"role": "user", "content": "go"}
SPECIAL_IDS = {TOKENIZER.token_to_id(token) for token in (*SPECIALS, *TAGS)}
EACH = pytest.mark.parametrize("name", TEMPLATES)
FEW = settings(max_examples=20)


def template_of(name):
    return ChatTemplate(TEMPLATES[name], {"bos_token": BOS.get(name, "")})


GENERIC = {name: prove(TOKENIZER, template_of(name)).renderer for name in TEMPLATES}
OWN_RENDERER = prove(TOKENIZER, ChatTemplate(OWN)).renderer


def shown(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


@EACH
def test_a_directory_is_rendered_by_the_family_whose_texts_its_template_gives(name, tmp_path):
    directory = model_dir(tmp_path, TOKENIZER, TEMPLATES[name], bos=BOS.get(name, ""))
    assert choose(read_model_files(directory)).name == name


def test_a_template_of_nobody_renders_for_itself(tmp_path):
    directory = model_dir(tmp_path, TOKENIZER, OWN)
    assert choose(read_model_files(directory)).name == "template"
    (directory / "chat_template.jinja").write_text(QWEN3)
    assert choose(read_model_files(directory)).name == "qwen3"
    assert choose(read_model_files(directory), "qwen3-keep").name == "qwen3-keep"


@pytest.mark.parametrize("name", ["qwen3", "kimi-k2", "deepseek-v3.1"])
@FEW
@given(data=st.data())
def test_a_template_and_its_familys_renderer_give_the_same_text(name, data):
    tools = data.draw(st.sampled_from([[], [json.loads(json.dumps(tool, sort_keys=True)) for tool in TOOLS]]))
    messages = [QUESTION]
    words = st.text("ab\n.", max_size=6)
    for _ in range(data.draw(st.integers(0, 3))):
        said = data.draw(answers(reasons=name in REASONING))
        late = [message for message in data.draw(tails(words)) if message["role"] != "system"]
        messages += [said, *(late or [QUESTION])]
    if name == "deepseek-v3.1":
        tools = []
    assert shown(GENERIC[name].render(messages, tools)) == shown(RENDERERS[name].render(messages, tools))


@FEW
@given(data=st.data())
def test_a_proved_template_extends_what_was_drawn_to_what_it_renders_at_once(data):
    messages, tools = [QUESTION], data.draw(st.sampled_from([[], TOOLS]))
    ids = OWN_RENDERER.render(messages, tools)
    for _ in range(data.draw(st.integers(1, 3))):
        said, tail = (
            data.draw(answers(reasons=True).map(lambda said: {"reasoning_content": "hm"} | said)),
            data.draw(tails()),
        )
        extension = OWN_RENDERER.extend(tail, finished=True)
        messages = [*messages, said, *tail]
        if extension is None:
            return
        ids = ids + OWN_RENDERER.answer(said) + extension
        assert ids == OWN_RENDERER.render(messages, tools)


@FEW
@given(said=answers(reasons=True).map(lambda said: {"reasoning_content": "hm"} | said))
def test_a_template_reads_its_own_spelling_of_an_answer(said):
    read = OWN_RENDERER.parse(OWN_RENDERER.answer(said))
    assert (read.get("reasoning_content"), read.get("content") or "") == (said["reasoning_content"], said["content"])
    assert [one["function"] for one in read.get("tool_calls", [])] == [
        one["function"] for one in said.get("tool_calls", [])
    ]


@EACH
@FEW
@given(told=tails(), word=hostile)
def test_no_message_can_write_a_token_through_a_template(name, told, word):
    def frame_of(messages, word):
        tools = [{"type": "function", "function": {"name": word or "x", "description": word, "parameters": {}}}]
        return [token for token in GENERIC[name].render(messages, tools) if token in SPECIAL_IDS]

    tame = [message | {"content": "x"} for message in told]
    assert frame_of([QUESTION, *told], word) == frame_of([QUESTION, *tame], "x")


def test_marked_texts_come_out_as_they_were():
    told = "\ufdd0<|im_end|>\ufdd0\ufdd0<think>"
    text = shown(GENERIC["smollm2"].render([{"role": "user", "content": told}], []))
    assert f"<|im_start|>user\n{told}<|im_end|>\n" in text


@pytest.mark.row("P-55")
def test_a_template_that_drops_reasoning_is_found_out_and_starts_branches_instead():
    proof = prove(TOKENIZER, ChatTemplate(QWEN3))
    first = next(found for found in proof.breaks if not found.refused)
    assert first.tail == ("user",)
    assert first.reason == "later turns do not show the answer's reasoning"
    assert (first.drawn_text, first.rendered_text) == ("<think>", "I")
    assert proof.renderer.extend([QUESTION], finished=True) is None
    assert proof.renderer.extend([{"role": "tool", "content": "R"}], finished=True) is not None


@pytest.mark.row("P-53")
def test_a_line_break_after_the_end_of_a_turn_goes_to_what_follows():
    (extension,) = [GENERIC["smollm2"].extend([QUESTION], finished=True)]
    assert shown(extension) == "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert shown(GENERIC["smollm2"].extend([QUESTION], finished=False)).startswith("<|im_end|>\n")


@pytest.mark.row("P-58")
def test_a_generation_prompt_of_many_tokens_is_no_part_of_an_answer():
    prompt = OWN_RENDERER.render([QUESTION], [])
    assert shown(prompt).endswith("<|im_start|>assistant says:\n<think>")
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert shown(OWN_RENDERER.answer(said)) == "hm</think>yes<|im_end|>"
    assert OWN_RENDERER.render([QUESTION, said, QUESTION], [])[: len(prompt)] == prompt


def test_a_template_that_looks_back_at_earlier_turns_is_never_extended():
    counting = SMOLLM2.replace("assistant\\n' if", "assistant\\n' + 'turn ' + (messages | length | string) + '\\n' if")
    proof = prove(TOKENIZER, ChatTemplate(counting))
    assert proof.breaks
    assert proof.renderer.extend([QUESTION], finished=True) is None
    assert proof.breaks[0].reason == "a later turn changes what was before it"


def test_a_renderer_that_forgets_a_line_break_is_found_out():
    class Forgetful(FormatRenderer):
        def extend(self, messages, *, finished):
            return super().extend(messages, finished=finished)[1:]

    found = find_breaks(Forgetful(TOKENIZER, Qwen3Format(keep=True)), probes_for(RENDERERS["qwen3-keep"]))
    assert found[0].reason == "what follows an answer is not what the whole conversation has there"
    assert found[0].rendered_text == "\n"


def test_what_a_template_refuses_is_a_refused_call():
    strict = ChatTemplate("{{ raise_exception('no tools here') if tools }}" + SMOLLM2)
    renderer = TemplateRenderer(TOKENIZER, strict)
    with pytest.raises(CallRefusedError, match="no tools here"):
        renderer.render([QUESTION], TOOLS)
    with pytest.raises(CallRefusedError, match="refuses these messages"):
        ChatTemplate("{{ messages[7].content.x() }}").text([QUESTION])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10**9) %}{% endfor %}"]
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(CallRefusedError):
        ChatTemplate(source).text([QUESTION])


def test_directories_that_cannot_be_rendered_are_refused_with_the_reason(tmp_path):
    with pytest.raises(PolicyError, match="cannot be read"):
        load_renderer(model_dir(tmp_path / "a", TOKENIZER, "{% if %}"))
    with pytest.raises(PolicyError, match="ends answers with no token"):
        load_renderer(model_dir(tmp_path / "b", TOKENIZER, "{% for m in messages %}{{ m.content }}\n{% endfor %}"))
    with pytest.raises(PolicyError, match="no words: a question, an answer and a question"):
        load_renderer(model_dir(tmp_path / "d", TOKENIZER, "{{ raise_exception('no words') }}"))
    directory = model_dir(tmp_path / "c", TOKENIZER, None)
    with pytest.raises(PolicyError, match="there is no chat template"):
        load_renderer(directory, "template")
    (directory / "chat_template.jinja").write_bytes(b"x" * (1 << 20) + b"x")
    with pytest.raises(PolicyError, match="larger than"):
        load_renderer(directory)


def test_templates_may_mark_answers_and_break_loops():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source).text([QUESTION, QUESTION]) == "go"


def test_the_check_says_what_holds_and_ends_with_three_when_something_does_not(tmp_path, capsys):
    directory = model_dir(tmp_path / "qwen", TOKENIZER, QWEN3)
    assert main(["gateway", "check", str(directory)]) == 3
    text = capsys.readouterr().out
    assert "goes on token by token after: system, tool, tool + system" in text
    assert "first break: question, reasoning, answer, then user" in text
    assert "later rendered" in text
    assert main(["gateway", "check", str(directory), "--renderer", "qwen3-keep", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["same_texts"], report["used"]["branches"]) == (False, [])
    assert main(["gateway", "check", str(model_dir(tmp_path / "own", TOKENIZER, OWN))]) == 0
    assert main(["gateway", "check", str(tmp_path / "missing")]) == 2


def test_a_template_that_knows_no_tools_is_reported(tmp_path):
    report = examine(model_dir(tmp_path, TOKENIZER, SMOLLM2), "template")
    assert (report.holds, report.used.tells_tools, report.used.tells_calls) == (False, False, False)
    assert report.used.branches == []


def test_arguments_keep_their_spelling_through_a_template():
    said = {"role": "assistant", "content": "", "tool_calls": [call("shell", '{"a" :  "\\u00e9"}')]}
    for name in ("qwen3", "llama-3", "kimi-k2", "deepseek-v3.1"):
        assert '{"a" :  "\\u00e9"}' in shown(GENERIC[name].render([QUESTION, said, QUESTION], []))


TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
FIRST_ONLY = "m.role != 'system' or loop.first"


def turns(turn):
    return (
        "{%- for m in messages -%}" + turn + "{%- endfor -%}{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}"
    )


@pytest.mark.parametrize(
    "turn",
    [
        "{%- if " + FIRST_ONLY + " -%}" + TURN + "{%- else -%}{{- raise_exception('System first.') -}}{%- endif -%}",
        "{%- if " + FIRST_ONLY + " -%}" + TURN + "{%- endif -%}",
    ],
    ids=["refuses", "leaves out"],
)
def test_a_late_word_of_the_system_is_told_as_a_users_where_a_template_has_no_place_for_it(turn):
    """Claude Code and Codex say such; Qwen3.5's template refuses it: https://github.com/ollama/ollama/issues/17774."""
    renderer = prove(TOKENIZER, ChatTemplate(turns(turn))).renderer
    system, late, said = ({"role": role, "content": role[0]} for role in ("system", "system", "assistant"))
    late = late | {"content": "late"}
    joined = [{"role": "system", "content": "s\n\nlate"}, QUESTION]
    assert shown(renderer.render([system, late, QUESTION], [])) == shown(renderer.render(joined, []))
    before, whole = [system, QUESTION], renderer.render([system, QUESTION, said, late], [])
    assert "<|im_start|>user\nlate<|im_end|>" in shown(whole)
    drawn = [*renderer.render(before, []), *renderer.answer(said)]
    assert [*drawn, *renderer.extend([late], finished=True)] == whole


def test_a_template_that_has_a_place_for_it_tells_it_as_the_systems():
    renderer = prove(TOKENIZER, ChatTemplate(turns(TURN))).renderer
    told = [{"role": "system", "content": "s"}, QUESTION, {"role": "assistant", "content": "a"}]
    assert "<|im_start|>system\nlate<|im_end|>" in shown(
        renderer.render([*told, {"role": "system", "content": "late"}], [])
    )
