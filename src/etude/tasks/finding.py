"""What is wrong with a task directory, for people and machines."""

from enum import StrEnum
from pathlib import Path

import msgspec


class Severity(StrEnum):
    """Whether a task can be used in spite of a finding."""

    ERROR = "error"
    WARNING = "warning"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, at one place."""

    path: str
    """The file, as reached from where the caller stands."""
    field: str = ""
    """Dotted key within `task.toml`, or the instruction of a Dockerfile; empty when the whole file is meant."""
    severity: Severity = Severity.ERROR
    message: str
    hint: str = ""
    """What to do about it."""

    def line(self) -> str:
        """Return the finding on one line, such as `foo/task.toml: environment.cpus: must be positive`."""
        place = f"{self.path}: {self.field}" if self.field else self.path
        return printable(f"{place}: {self.message}" + (f"; {self.hint}" if self.hint else ""))


def warning(path: Path | str, message: str, hint: str, *, field: str = "") -> Finding:
    """Return a finding that does not keep a task from being used."""
    return Finding(path=printable(path), field=field, severity=Severity.WARNING, message=message, hint=hint)


def printable(text: Path | str) -> str:
    """Return text that can neither move a terminal's cursor nor break a message into two lines."""
    text = str(text)
    return text if text.isprintable() else repr(text)[1:-1]
