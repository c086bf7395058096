"""Progress on screen: rich on a terminal, plain lines in a file, one JSON object per line for machines."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol, TextIO

import msgspec

from etude.telemetry.lines import printable, step_line
from etude.telemetry.rows import json_value

ConsoleMode = Literal["auto", "plain", "json"]
Advance = Callable[[int], None]
"""Called with the number of units done since the last call."""

_PLAIN_LINES = 10
"""Lines that a piece of long work prints where no bar can be drawn."""


class Console(Protocol):
    """Where people see what a run does. Text from outside may be passed as it is."""

    def note(self, text: str) -> None:
        """Print one line."""
        ...

    def step(self, row: Mapping[str, object], *, total: int | None = None) -> None:
        """Print one line for one optimizer step."""
        ...

    def progress(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Show how much of some long work is done."""
        ...


class PlainConsole:
    """Lines without colour or movement."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        """Print one line."""
        self._stream.write(printable(text) + "\n")
        self._stream.flush()

    def step(self, row: Mapping[str, object], *, total: int | None = None) -> None:
        """Print one line."""
        self.note(step_line(row, total=total))

    @contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        """Print a line at every tenth of the work."""
        yield _every_tenth(total, lambda done: self.note(f"{label}: {done}/{total}"))


class JsonConsole:
    """One JSON object per line; `event` is `note`, `step` or `progress`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        """Print `{"event": "note", "text": ...}`."""
        self._write({"event": "note", "text": text})

    def step(self, row: Mapping[str, object], *, total: int | None = None) -> None:
        """Print the whole row with `"event": "step"` and the `total` number of steps."""
        self._write({"event": "step", **row, "total": total})

    @contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        """Print `{"event": "progress", "label": ..., "done": ..., "total": ...}` at every tenth of the work."""
        yield _every_tenth(
            total, lambda done: self._write({"event": "progress", "label": label, "done": done, "total": total})
        )

    def _write(self, event: Mapping[str, object]) -> None:
        plain = {name: json_value(value) for name, value in event.items()}
        self._stream.write(msgspec.json.encode(plain).decode() + "\n")
        self._stream.flush()


def open_console(mode: ConsoleMode, stream: TextIO) -> Console:
    """Return the console for a stream; `auto` is rich on a terminal and plain elsewhere."""
    if mode == "json":
        return JsonConsole(stream)
    if mode == "plain" or not stream.isatty():
        return PlainConsole(stream)
    from etude.telemetry.terminal import TerminalConsole  # noqa: PLC0415 - rich costs 0.1 s that --help need not pay

    return TerminalConsole(stream)


def _every_tenth(total: int, show: Callable[[int], None]) -> Advance:
    done = 0

    def advance(units: int) -> None:
        nonlocal done
        before = done * _PLAIN_LINES // max(total, 1)
        done += units
        if done * _PLAIN_LINES // max(total, 1) > before:
            show(done)

    return advance
