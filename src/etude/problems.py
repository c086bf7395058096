"""What is wrong with a configuration or a task file, one line per problem, with the key that was probably meant."""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)

OTHER_NAMES = {
    "batch_size": "rollout.groups_per_step",
    "checkpoint_interval": "checkpoint.every",
    "learning_rate": "trainer.lr",
    "max_completion_length": "sampling.max_tokens",
    "max_grad_norm": "trainer.grad_clip",
    "max_lag": "rollout.max_staleness",
    "max_new_tokens": "sampling.max_tokens",
    "max_off_policy_steps": "rollout.max_staleness",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "trainer.steps",
    "num_generations": "rollout.group_size",
    "output_dir": "run.url",
    "rollouts_per_example": "rollout.group_size",
    "save_interval": "checkpoint.every",
}
"""What comparable systems call a setting, and what it is called here; a key that is renamed gets a line as well."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with what a user wrote."""

    key: str
    """Dotted, such as `pools.0.view`; empty when the problem is between several keys."""
    message: str


def checked(model: type[Model], data: Mapping[str, object]) -> Model:
    """Build a model from what a TOML file holds, without turning one type into another.

    Raises:
        ValidationError: For `explain`.
    """
    # Strict and through JSON: arrays become tuples, but "5" is no number and true is not 1.
    return model.model_validate_json(json.dumps(data, default=str), strict=True)


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return every problem that pydantic found, each on one line and with the full dotted key."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        loc = item["loc"]
        key = ".".join(str(part) for part in loc)
        if item["type"] == "extra_forbidden":
            guess = suggestion(model, loc)
            message = f"unknown key; did you mean {guess}?" if guess else "unknown key"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "json_invalid":
            message = "holds text that is not UTF-8, or tables nested too deeply"
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            key = "" if key and message.startswith(key) else key
        else:
            shown = json.dumps(item["input"], default=str)
            message = f"{item['msg'].replace('Input should', 'must')}, got {shown[:60]}"
        problems.append(Problem(key=key, message=message))
    return problems


def suggestion(model: type[BaseModel], loc: Sequence[str | int]) -> str | None:
    """Return the dotted key that was probably meant by an unknown one, if any is close."""
    *above, last = loc
    everything = list(known_keys(model))
    if (renamed := OTHER_NAMES.get(str(last))) in everything:
        return renamed
    section = _section_at(model, above)
    siblings = list(section.model_fields) if section else []
    if close := get_close_matches(str(last), siblings, n=1):
        return ".".join(str(part) for part in (*above, close[0]))
    elsewhere = [key for key in everything if key.rpartition(".")[2] == last]
    written = ".".join(str(part) for part in loc)
    return next(iter(elsewhere or get_close_matches(written, everything, n=1, cutoff=0.75)), None)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every field and table; entries of a list of tables have index 0."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if section := section_of(field.annotation):
            is_list = get_origin(field.annotation) in (tuple, list)
            yield from known_keys(section, f"{prefix}{name}.0." if is_list else f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - annotations have no common type
    """Return the table's model within a field's annotation, if the field is a table or a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def _section_at(model: type[BaseModel] | None, loc: Sequence[str | int]) -> type[BaseModel] | None:
    for part in loc:
        if model and isinstance(part, str):
            field = model.model_fields.get(part)
            model = section_of(field.annotation) if field else None
    return model
