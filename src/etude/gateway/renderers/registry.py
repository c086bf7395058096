"""Which renderer fits a model directory."""

from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from etude.errors import PolicyError
from etude.gateway.renderers.chatml import TURN_END, TURN_START, ChatMLRenderer

SUPPORTED = ("chatml", "chatml-compact")


class _EtudeFile(msgspec.Struct, frozen=True):
    """What `etude.json` in a model directory says about rendering."""

    renderer: str = "auto"


def load_renderer(model_dir: str | Path, name: str = "auto") -> ChatMLRenderer:
    """Return the renderer of a Hugging Face model directory.

    `auto` takes the `renderer` named in the directory's `etude.json`; without one, `chatml` if the tokenizer has its
    two turn tokens. Raises `PolicyError` when `tokenizer.json` is missing or broken or nothing fits.
    """
    directory = Path(model_dir)
    tokenizer = _load_tokenizer(directory / "tokenizer.json")
    if name == "auto":
        name = _declared(directory / "etude.json")
    if name == "auto" and None not in (tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)):
        name = "chatml"
    if name == "chatml":
        return ChatMLRenderer(tokenizer, "chatml")
    if name == "chatml-compact":
        return ChatMLRenderer(tokenizer, "chatml-compact")
    found = f"no renderer is named {name!r}" if name != "auto" else f"the tokenizer lacks {TURN_START} and {TURN_END}"
    msg = f"{directory}: {found}. Supported are {', '.join(SUPPORTED)}; set policy.renderer or use another model"
    raise PolicyError(msg)


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


def _declared(path: Path) -> str:
    if not path.is_file():
        return "auto"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_EtudeFile).renderer
    except msgspec.DecodeError as error:
        msg = f'{path}: {error}. Expected is {{"renderer": NAME}} with one of {", ".join(SUPPORTED)}'
        raise PolicyError(msg) from error
