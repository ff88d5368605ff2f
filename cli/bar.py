"""Progress on a terminal: one line of rich's columns, never wider than the terminal."""

from __future__ import annotations

from typing import Any, ClassVar

from rich import progress as rich
from rich.console import Console
from rich.table import Column

from .printable import printable

# On a terminal with fewer columns there is neither a bar nor a speed, so that there is room for the name.
LEAST_FOR_A_BAR = 100


class Bar:
    """A line with a bar, shown from the first call on. A new one takes the place of an older one.

    verb: what is done
    unit: what is counted; None for a count without a unit
    console: the terminal; by default stderr
    """

    _shown: ClassVar[rich.Progress | None] = None

    def __init__(self, verb: str, unit: str | None, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        is_wide, is_bytes = console.width >= LEAST_FOR_A_BAR, unit == "bytes"
        line: dict[str, Any] = {"console": console, "transient": True, "expand": True}
        self._verb, self._unit = verb, unit
        self._steps = rich.Progress(_text("step"), rich.TimeElapsedColumn(), **line)
        self._progress = rich.Progress(
            rich.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            *([rich.BarColumn(bar_width=20)] if is_wide else []),
            rich.DownloadColumn(table_column=Column(no_wrap=True)) if is_bytes else _text("count"),
            *([rich.TransferSpeedColumn(table_column=Column(no_wrap=True))] if is_wide and is_bytes else []),
            rich.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            _text("name", ratio=1),
            **line,
        )
        self._step = self._steps.add_task(verb, total=None, step=verb)
        self._task = self._progress.add_task(verb, total=None, name="", count="")

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show how far the job is, and the name of what is done now."""
        self._show(self._progress)
        count = f"{done}/{total} {self._unit or ''}"
        self._progress.update(self._task, completed=done, total=total, name=printable(name), count=count)

    def status(self, text: str) -> None:
        """Show a step that cannot say how far it is; an empty text ends it."""
        if not text and self._progress.tasks[0].total is not None:
            self._show(self._progress)
            return
        self._steps.update(self._step, step=", ".join(part for part in (self._verb, printable(text)) if part))
        if text:
            self._show(self._steps)

    def close(self) -> None:
        """Remove the line."""
        if Bar._shown in (self._steps, self._progress):
            Bar._shown.stop()
            Bar._shown = None

    def _show(self, line: rich.Progress) -> None:
        if Bar._shown is not line:
            if Bar._shown is not None:
                Bar._shown.stop()
            Bar._shown = line
            line.start()


def _text(field: str, ratio: int | None = None) -> rich.TextColumn:
    """Return a column with a field of the task, cut where there is no room for it."""
    column = Column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    return rich.TextColumn(f"{{task.fields[{field}]}}", markup=False, table_column=column)
