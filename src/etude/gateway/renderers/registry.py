"""Which renderer fits a model directory."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from etude.errors import PolicyError
from etude.gateway.refusals import CallRefusedError
from etude.gateway.renderers.chat_template import MAX_BYTES, ChatTemplate
from etude.gateway.renderers.chatml import TURN_END, TURN_START, ChatMLRenderer
from etude.gateway.renderers.deepseek import DeepSeekFormat
from etude.gateway.renderers.family import FamilyRenderer, Format, FormatRenderer, tail_of
from etude.gateway.renderers.kimi import KimiFormat
from etude.gateway.renderers.llama import LlamaFormat
from etude.gateway.renderers.proof import Break, Probe, find_breaks, probes_for
from etude.gateway.renderers.qwen3 import Qwen3Format
from etude.gateway.renderers.template import TemplateRenderer
from etude.gateway.renderers.vocabulary import Vocabulary


def _made_of(form: Format) -> Callable[[Vocabulary], FamilyRenderer]:
    return lambda vocabulary: FormatRenderer(vocabulary, form)


# In the order in which `auto` compares them with a template.
_FAMILIES: dict[str, Callable[[Vocabulary], FamilyRenderer]] = {
    "qwen3": _made_of(Qwen3Format()),
    "qwen3-thinking": _made_of(Qwen3Format(opens_reasoning=True)),
    "deepseek-v3": _made_of(DeepSeekFormat()),
    "deepseek-v3.1": _made_of(DeepSeekFormat(newer=True)),
    "kimi-k2": _made_of(KimiFormat()),
    "kimi-k2-thinking": _made_of(KimiFormat(thinking=True)),
    "llama-3": _made_of(LlamaFormat()),
    "chatml": ChatMLRenderer,
    "smollm2": lambda vocabulary: ChatMLRenderer(vocabulary, "smollm2"),
}
_DECLARED: dict[str, Callable[[Vocabulary], FamilyRenderer]] = {
    "chatml-compact": lambda vocabulary: ChatMLRenderer(vocabulary, "chatml-compact"),
    "qwen3-keep": _made_of(Qwen3Format(keep=True)),
    "qwen3-thinking-keep": _made_of(Qwen3Format(opens_reasoning=True, keep=True)),
    "qwen3-no-thinking": _made_of(Qwen3Format(closes_reasoning=True)),
    "deepseek-r1": _made_of(DeepSeekFormat(thinking=True)),
    "deepseek-r1-keep": _made_of(DeepSeekFormat(thinking=True, keep=True)),
    "deepseek-v3.1-thinking": _made_of(DeepSeekFormat(newer=True, thinking=True)),
    "deepseek-v3.1-thinking-keep": _made_of(DeepSeekFormat(newer=True, thinking=True, keep=True)),
    "kimi-k2-thinking-keep": _made_of(KimiFormat(thinking=True, keep=True)),
}
SUPPORTED = (*_FAMILIES, *_DECLARED, "template")
"""Names that `policy.renderer` and `etude.json` may say."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a model directory says about rendering."""

    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    declared: str
    """The renderer that `etude.json` names, or `auto`."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A renderer and how it was found."""

    name: str
    renderer: FamilyRenderer


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried of a template, what broke, and a renderer that extends the rest."""

    renderer: FamilyRenderer
    probes: list[Probe]
    breaks: list[Break]


class _EtudeFile(msgspec.Struct, frozen=True):
    renderer: str = "auto"


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Special(msgspec.Struct, frozen=True):
    content: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _Special | None = None
    eos_token: str | _Special | None = None
    pad_token: str | _Special | None = None
    unk_token: str | _Special | None = None


def load_renderer(model_dir: str | Path, name: str = "auto") -> FamilyRenderer:
    """Return the renderer of a Hugging Face model directory; see `choose`."""
    return choose(read_model_files(model_dir), name).renderer


def choose(files: ModelFiles, name: str = "auto") -> Choice:
    """Return the renderer called `name`.

    `auto` takes the one that the directory's `etude.json` names. Without it, the family whose texts are those of the
    directory's own chat template, else `template`; without a template, `chatml` if the tokenizer has its two turn
    tokens. Raises `PolicyError` when nothing fits.
    """
    if name == "auto":
        name = files.declared
    if name == "auto" and files.template is not None:
        vocabulary = Vocabulary(files.tokenizer)
        own = prove(vocabulary, files.template).renderer
        return _same_family(vocabulary, own) or Choice(name="template", renderer=own)
    if name == "auto" and None not in (files.tokenizer.token_to_id(TURN_START), files.tokenizer.token_to_id(TURN_END)):
        name = "chatml"
    if make := (_FAMILIES | _DECLARED).get(name):
        return Choice(name=name, renderer=make(Vocabulary(files.tokenizer)))
    if name == "template" and files.template is not None:
        return Choice(name=name, renderer=prove(Vocabulary(files.tokenizer), files.template).renderer)
    found = f"no renderer is named {name!r}"
    if name == "template":
        found = "there is no chat template"
    if name == "auto":
        found = f"there is no chat template, and the tokenizer lacks {TURN_START} and {TURN_END}"
    msg = f"{files.directory}: {found}. Supported are {', '.join(SUPPORTED)}; set policy.renderer or use another model"
    raise PolicyError(msg)


def prove(tokenizer: Tokenizer | Vocabulary, template: ChatTemplate) -> Proof:
    """Try a template on made-up conversations, and return what holds and a renderer that extends just that."""
    vocabulary = Vocabulary.of(tokenizer)
    hopeful = TemplateRenderer(vocabulary, template)
    probes = probes_for(hopeful, drops_reasoning="</think>" in template.source)
    breaks = find_breaks(hopeful, probes)
    broken = {found.probe for found in breaks}
    holds = {tail_of(probe.tail) for probe in probes if probe.name not in broken}
    holds -= {found.tail for found in breaks if not found.refused}
    renderer = TemplateRenderer(vocabulary, template, extendable=holds.__contains__)
    return Proof(renderer=renderer, probes=probes, breaks=breaks)


def read_model_files(model_dir: str | Path) -> ModelFiles:
    """Return what a model directory says; raise `PolicyError` when a file is missing or broken."""
    directory = Path(model_dir)
    return ModelFiles(
        directory=directory,
        tokenizer=_load_tokenizer(directory / "tokenizer.json"),
        template=_load_template(directory),
        declared=_declared(directory / "etude.json"),
    )


def _same_family(vocabulary: Vocabulary, own: FamilyRenderer) -> Choice | None:
    """Return the first family that gives all probes the texts that the directory's template gives them."""
    for name, make in _FAMILIES.items():
        try:
            renderer = make(vocabulary)
        except PolicyError:
            continue
        if differing_text(renderer, own) is None:
            return Choice(name=name, renderer=renderer)
    return None


def differing_text(renderer: FamilyRenderer, own: FamilyRenderer) -> tuple[str, str] | None:
    """Return the first two texts that differ, or None.

    Conversations that the template refuses do not count, nor does where it puts a late word of the system.
    """
    for probe in probes_for(own):
        if "system" in tail_of(probe.tail):
            continue
        messages = [*probe.before, probe.answer, *probe.tail]
        try:
            expected = own.text(own.render(messages, probe.tools))
        except CallRefusedError:
            continue
        found = renderer.text(renderer.render(messages, probe.tools))
        if found != expected:
            return found, expected
    return None


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read ({error}): a model directory needs the tokenizer.json of Hugging Face"
        raise PolicyError(msg) from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        msg = f"{path} is no tokenizer: {error}"
        raise PolicyError(msg) from error


def _load_template(directory: Path) -> ChatTemplate | None:
    """Return the template of `chat_template.jinja`, else that of `tokenizer_config.json`."""
    config = _TokenizerConfig()
    path = directory / "tokenizer_config.json"
    if path.is_file():
        try:
            config = msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
        except msgspec.DecodeError as error:
            msg = f"{path}: {error}"
            raise PolicyError(msg) from error
    told = config.chat_template
    if isinstance(told, list):
        by_name = {one.name: one.template for one in told}
        told = by_name.get("tool_use") or by_name.get("default")
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_BYTES:
            msg = f"{path} is larger than {MAX_BYTES} bytes"
            raise PolicyError(msg)
        told = path.read_text("utf-8", errors="replace")
    if not told:
        return None
    names = {name: getattr(config, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token.content if isinstance(token, _Special) else token for name, token in names.items()}
    return ChatTemplate(told, {name: text or "" for name, text in texts.items()})


def _declared(path: Path) -> str:
    if not path.is_file():
        return "auto"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_EtudeFile).renderer
    except msgspec.DecodeError as error:
        msg = f'{path}: {error}. Expected is {{"renderer": NAME}} with one of {", ".join(SUPPORTED)}'
        raise PolicyError(msg) from error
