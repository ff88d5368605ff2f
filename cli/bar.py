"""Progress on a terminal: one line, never wider than the terminal."""

from __future__ import annotations

from typing import ClassVar

from rich import progress as rich
from rich.console import Console
from rich.text import Text

from .amounts import BYTES, amount_of, duration, size
from .printable import printable

# Cells of the bar, and whether the speed is shown: the first that leaves room for the name is taken.
LAYOUTS = ((30, True), (20, True), (10, True), (10, False), (0, False))
# The characters of the line that other encodings than UTF-8 lack, and what stands for them there.
PLAIN = str.maketrans("█░…", "#-~")
# Room for a name that is worth a shorter bar, and the least that says anything.
NAME_CELLS, LEAST_NAME_CELLS = 24, 8


class Bar:
    """A line with a bar, shown from the first call on. A new one takes the place of an older one.

    verb: what is done
    unit: what is counted; None for a count without a unit
    console: the terminal; by default stderr
    """

    _shown: ClassVar[Bar | None] = None

    def __init__(self, verb: str, unit: str | None, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = rich.Progress(_Line(unit, console), console=console, transient=True)
        self._task = self._progress.add_task(verb, total=None, name="", status="")

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show how far the job is, and the name of what is done now."""
        self._show()
        if self._progress.tasks[0].total is None:
            self._progress.update(self._task, status="")
        self._progress.update(self._task, completed=done, total=total, name=name)

    def status(self, text: str) -> None:
        """Show a step that cannot say how far it is; an empty text ends it."""
        self._progress.update(self._task, status=text)
        if text:
            self._show()

    def close(self) -> None:
        """Remove the line."""
        if Bar._shown is self:
            self._progress.stop()
            Bar._shown = None

    def _show(self) -> None:
        if Bar._shown is not self:
            if Bar._shown is not None:
                Bar._shown.close()
            Bar._shown = self
            self._progress.start()


class _Line(rich.ProgressColumn):
    """The whole line."""

    max_refresh = None

    def __init__(self, unit: str | None, console: Console) -> None:
        super().__init__()
        self._unit, self._console = unit, console

    def render(self, task: rich.Task) -> Text:
        """Return the line of a task."""
        line = _line(task, self._unit, self._console.width - 1)
        if not self._console.encoding.startswith("utf"):
            line = line.translate(PLAIN)
        return Text(line, no_wrap=True, overflow="crop")


def _line(task: rich.Task, unit: str | None, width: int) -> str:
    """Return verb, bar, amounts, speed, time left and name, as far as they fit into `width` cells."""
    verb, name = task.description, printable(task.fields["status"] or task.fields["name"])
    if task.total is None:
        since = f"{task.elapsed or 0:.0f} s"
        return _shortened(", ".join(part for part in (verb, name, since) if part), width)
    amounts = amount_of(task.completed, task.total, unit)
    speed = f"{size(task.speed)}/s" if unit == BYTES and task.speed else ""
    left = "" if task.time_remaining is None else f"{duration(task.time_remaining)} left"
    share = task.completed / task.total if task.total else 1.0
    text = ""
    for cells, with_speed in LAYOUTS:
        parts = [verb, _bar(share, cells), amounts, speed if with_speed else "", left]
        text = "  ".join(part for part in parts if part)
        if width - len(text) - 2 >= min(len(name), NAME_CELLS):
            break
    if len(text) > width:
        text = f"{verb}  {share:.0%}"
    room = width - len(text) - 2
    return f"{text}  {_shortened(name, room)}" if name and room >= LEAST_NAME_CELLS else text


def _bar(share: float, cells: int) -> str:
    full = round(min(share, 1.0) * cells)
    return "█" * full + "░" * (cells - full)


def _shortened(name: str, cells: int) -> str:
    """Return a name, cut from the left if it has more cells than given: its end tells the tensors of a layer apart."""
    return name if len(name) <= cells else "…" + name[len(name) - cells + 1 :]
