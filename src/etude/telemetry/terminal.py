"""The console of a terminal, with bars. Importing it imports rich."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from etude.telemetry.lines import printable, step_line


class TerminalConsole:
    """Lines above a bar that shows how far long work is."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = RichConsole(file=stream, highlight=False, markup=False, emoji=False)

    def note(self, text: str) -> None:
        """Print one line."""
        self._rich.print(Text(printable(text)), soft_wrap=True)

    def step(self, row: Mapping[str, object], *, total: int | None = None) -> None:
        """Print one line, the step in bold."""
        line = Text(step_line(row, total=total))
        line.stylize("bold", 0, line.plain.find("  "))
        self._rich.print(line, soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Generator[Callable[[int], None]]:
        """Draw a bar; lines printed meanwhile appear above it."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True) as bars:
            task = bars.add_task(printable(label), total=total)
            yield lambda units: bars.advance(task, units)
