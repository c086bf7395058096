"""Where a run's configuration comes from: defaults < file < environment < `--set`, each value with its origin."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast, get_args, get_origin

import msgspec
from pydantic import BaseModel, ValidationError

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.problems import checked, explain
from etude.runtime.toml import Table, is_list_of_tables, is_table, leaves, to_toml

ENV_PREFIX = "ETUDE__"
MAX_FILE_BYTES = 1 << 20
DEFAULT = "default"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A validated configuration that knows where each value came from."""

    config: RunConfig
    provenance: dict[str, str]
    """Dotted key of every value (`trainer.lr`, `pools.0.view`) to its origin: `default`, the file, the environment
    variable, or `--set`."""


def load_settings(file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read a TOML file, `ETUDE__TABLE__KEY` variables and `table.key=value` overrides; the later ones win.

    Args:
        file: None for defaults only.
        overrides: Values in TOML's syntax, or text without quotes. A pool is named by its index or its name:
            `pools.0.view=bf16`, `pools.local.view=bf16`.
        environ: All variables of the process; those with another prefix are not looked at.

    Raises:
        ConfigError: With every problem on its own line.
    """
    layers = _Layers()
    if file is not None:
        for key, value in _read(file).items():
            layers.put([key], value, origin=str(file))
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            layers.override(_path_of_variable(name), environ[name], origin=name)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: there is no '='; write --set table.key=value")
        layers.override(key.strip().split("."), value.strip(), origin="--set")
    try:
        config = checked(RunConfig, layers.tree)
    except ValidationError as error:
        problems = explain(error, RunConfig)
        raise ConfigError("\n".join(layers.blame(item.key, item.message) for item in problems)) from error
    return Settings(config=config, provenance={key: layers.origin(key) for key in leaves(_table_of(config))})


def resolved_toml(settings: Settings) -> str:
    """Return the whole configuration as TOML that reads back to the same, each value with its origin as a comment."""
    shown = {key: origin if origin.isprintable() else repr(origin) for key, origin in settings.provenance.items()}
    return to_toml(_table_of(settings.config), shown)


def json_schema() -> dict[str, object]:
    """Return the JSON Schema of a configuration file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


class _Layers:
    """The values so far as a tree, and the origin of each that is no default."""

    def __init__(self) -> None:
        self.tree = _table_of(RunConfig())
        self._origins: dict[str, str] = {}

    def put(self, path: Sequence[str], value: object, *, origin: str) -> None:
        """Lay a value over the tree: tables are merged, everything else replaces what was there."""
        *above, last = path
        table: Table = self._at(above)
        if is_table(value) and is_table(table.get(last)):
            for key, below in value.items():
                self.put([*path, key], below, origin=origin)
            return
        table[last] = value
        key = ".".join(path)
        self._origins = {old: where for old, where in self._origins.items() if not _is_within(old, key)}
        self._origins |= dict.fromkeys(leaves(value, key), origin)

    def override(self, path: Sequence[str], text: str, *, origin: str) -> None:
        """Lay a value over the tree that is given as text.

        Raises:
            ConfigError: When the path leads through something that has no keys.
        """
        where = f"{origin}: {'.'.join(path)}".rstrip(": ")
        if not all(path):
            raise ConfigError(f"{where}: has an empty key; write table.key=value")
        real: list[str] = []
        node: object = self.tree
        for part in path:
            if is_table(node):
                # A table that nobody knows is made here and refused later, with all other problems.
                node = node.get(part) if len(real) == len(path) - 1 else node.setdefault(part, {})
                real.append(part)
            elif is_list_of_tables(node) and len(real) < len(path) - 1:
                index = _index(node, part, where)
                node = node[index]
                real.append(str(index))
            else:
                raise ConfigError(f"{where}: {'.'.join(real)} has no keys that could be set")
        self.put(real, _parse(text, wants_text=_annotation(real) is str), origin=origin)

    def origin(self, key: str) -> str:
        """Return where a value came from."""
        return self._origins.get(key, DEFAULT)

    def blame(self, key: str, message: str) -> str:
        """Return a problem on one line that begins with the origin of the value, or of what is next to it."""
        place, origins = key, set[str]()
        while place and not origins:
            origins = {origin for name, origin in self._origins.items() if _is_within(name, place)}
            place = place.rpartition(".")[0]
        where = origins.pop() if len(origins) == 1 else ""
        return ": ".join(part for part in (where, key, message) if part)

    def _at(self, path: Sequence[str]) -> Table:
        node: object = self.tree
        for part in path:
            node = node[int(part)] if is_list_of_tables(node) else cast("dict[str, object]", node)[part]
        return cast("Table", node)


def _read(file: Path) -> Table:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name a TOML file, such as recipes/quickstart.toml") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_FILE_BYTES} bytes; name a TOML file")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _parse(text: str, *, wants_text: bool) -> object:
    """Read a value in TOML's syntax; what is not TOML is text as it stands."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value: object = parsed["value"]
    # A directory may be called 7, and a date is text to a configuration that has no dates.
    if len(parsed) > 1 or not isinstance(value, str if wants_text else str | int | float | list | dict):
        return text
    return cast("object", value)


def _path_of_variable(name: str) -> list[str]:
    path: list[str] = []
    for part in name.removeprefix(ENV_PREFIX).split("__"):
        # Names of variables are capitals; those that are themselves keys, below harness.env, stay as they are.
        is_free = get_origin(_annotation(path)) is dict
        path.append(part if is_free else part.lower())
    return path


def _annotation(path: Sequence[str]) -> object:
    """Return the type that the configuration declares at a path, or None."""
    annotation: object = RunConfig
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(part)
            annotation = field.annotation if field else None
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return None
    return annotation


def _index(tables: list[Table], part: str, where: str) -> int:
    names = [str(table.get("name", "")) for table in tables]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(tables):
        return int(part)
    raise ConfigError(f"{where}: there is no {part!r}; known are {', '.join(names)}, and 0 to {len(tables) - 1}")


def _is_within(key: str, place: str) -> bool:
    return f"{key}.".startswith(f"{place}.")


def _table_of(config: RunConfig) -> Table:
    return config.model_dump(mode="json")
