"""The generated task families: how their problems are drawn and written down, and what there is to learn from."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.tasks import longread, longread_corpus, pyfix, pyfix_corpus
from etude.tasks.mini_talk import Message

Problem = TypeVar("Problem")


class Tasks(Protocol[Problem]):
    """A module that draws problems and writes them as Harbor tasks."""

    def problems(self, seed: str, *, exclude: frozenset[str] = ...) -> Iterator[Problem]:
        """Yield problems without end, none of which has a text in `exclude`."""
        ...

    def texts_of(self, chosen: list[Problem]) -> frozenset[str]:
        """Return the texts that no other split may contain."""
        ...

    def write_task(self, problem: Problem, directory: Path) -> Path:
        """Write a task directory and return its path."""
        ...


class Corpus(Protocol[Problem]):
    """A module of texts about problems."""

    def source(self, problem: Problem) -> str:
        """Return a short text of the family."""
        ...

    def shell_log(self, problem: Problem) -> list[Message]:
        """Return messages with work at the problem that was done well.

        If a user's comes first, they are a conversation, and only its answers are learned; else all of them is.
        """
        ...

    def demonstrations(
        self, chosen: list[Problem], *, seed: str, good_share: float, is_full: Callable[[list[Message]], bool] = ...
    ) -> Iterator[list[Message]]:
        """Yield conversations, without their system messages, of attempts that are good in this share.

        `is_full` says of the messages until an answer whether the harness asks for a summary next.
        """
        ...


class Family(NamedTuple):
    """Both modules of a family; what its problems are is its own business."""

    tasks: Tasks[Any]
    corpus: Corpus[Any]


FAMILIES = {"pyfix": Family(pyfix, pyfix_corpus), "longread": Family(longread, longread_corpus)}


def family_of(config: RunConfig) -> Family:
    """Return the family that `tasks.family` names; raise `ConfigError` when it names none."""
    if not config.tasks.family:
        names = " or ".join(f"'{name}'" for name in FAMILIES)
        msg = (
            f"there is no text to learn from: set tasks.family = {names}, or start from a model with policy.path and "
            "leave pretrain and sft out of stages"
        )
        raise ConfigError(msg)
    return FAMILIES[config.tasks.family]
