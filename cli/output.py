"""What commands print: data on stdout, everything else on stderr, one line for an expected error.

With --quiet, notes, progress and the summaries of what was written are not printed; errors, warnings, JSON and what a
command was asked to show are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import typer

from . import interrupts
from .amounts import BYTES, amount
from .amounts import size as size
from .tables import table as table
from .tables import wrapped

# Jobs, and steps without progress, that end within this many seconds show no line where stderr is not a terminal.
QUIET_SECONDS = STATUS_SECONDS = 2.0
# Seconds between two lines of progress.
PLAIN_LINE_SECONDS = 5.0

# How lines begin that warn of a result that may be wrong.
WARNING = "WARNING: "
# Whether the command that is running was asked to be quiet.
_quiet = False


def print_json(value: Any) -> None:
    """Write the one JSON document of a command to stdout."""
    from pqweights.strict_json import json_text

    sys.stdout.write(json_text(value))
    sys.stdout.write("\n")
    sys.stdout.flush()


def print_json_pieces(pieces: Iterable[bytes]) -> None:
    """Write the one JSON document of a command, which comes as text in pieces, to stdout."""
    for piece in pieces:
        sys.stdout.write(piece.decode())
    sys.stdout.flush()


def summary(text: str) -> None:
    """Write what a command did to stdout, folded; if it is to be quiet, only lines that warn, and these to stderr."""
    if not _quiet:
        typer.echo(wrapped(text))
        return
    for line in text.splitlines():
        if line.startswith(WARNING):
            typer.echo(wrapped(line, sys.stderr), err=True)


def note(text: str) -> None:
    """Write a line for the user to stderr, unless the command is to be quiet."""
    if not _quiet:
        typer.echo(text, err=True)


def warn(text: str) -> None:
    """Write a line about a result that may be wrong to stderr, also if the command is to be quiet."""
    typer.echo(wrapped(f"{WARNING}{text}", sys.stderr), err=True)


@contextlib.contextmanager
def errors(kept: Callable[[], bool] | None = None, quiet: bool = False) -> Iterator[None]:
    """Turn expected errors into one line on stderr and exit code 1, or 2 for wrong options; a bug keeps its traceback.

    kept: whether an interrupted run left something from which the same command continues; None if it never does
    quiet: whether to print only errors, warnings, and what the command was asked to show
    """
    global _quiet
    from pqweights.errors import OptionError, PqweightsError

    _quiet = quiet
    try:
        with interrupts.Raised():
            yield
    except OptionError as error:
        fail(str(error), code=2)
    except PqweightsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        typer.echo(f"interrupted{_how_to_continue(kept)}", err=True)
        raise typer.Exit(interrupts.EXIT_CODE) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    finally:
        _quiet = False


def _how_to_continue(kept: Callable[[], bool] | None) -> str:
    if kept is None:
        return ""
    return "; run the same command again to continue where it stopped" if kept() else "; no results were kept"


def fail(message: str, code: int = 1) -> NoReturn:
    """Write one line to stderr and exit."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def leave(code: str | int | None, error: OSError | None = None) -> NoReturn:
    """Write out what stdout still holds, and exit; left to Python's own end, an error there is more than one line.

    code: the exit code so far; if it is not 0, the user was told why, and an error here is not told any more
    error: what ended the command outside of `errors`, where only help and the version are written to stdout
    """
    try:
        if error is not None:
            raise error
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what stdout still holds, which Python flushes once more
        if not code and failure.errno != errno.EPIPE:
            typer.echo(f"error: output: {failure.strerror or failure}", err=True)
        code = code or 1
    sys.exit(code)


class Display(Protocol):
    """Something that shows how far a job is."""

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show how far the job is, and the name of what is done now."""
        ...

    def status(self, text: str) -> None:
        """Show a step that cannot say how far it is, until an empty text or the first call of the display ends it."""
        ...

    def close(self) -> None:
        """Show nothing from now on."""
        ...


@contextlib.contextmanager
def progress(verb: str, unit: str | None = BYTES) -> Iterator[Display]:
    """Yield a callback that shows progress, rate and time left: as a bar on a terminal, else as lines on stderr."""
    from pqweights.notices import listening

    display = _display(verb, unit)
    try:
        with listening(display.status):
            yield display
    finally:
        display.close()


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show what a slow step does while it lasts: on a terminal at once, else by a line if it takes longer than 2 s."""
    from pqweights.notices import listening

    display = _display("", None)
    try:
        with listening(lambda step: display.status(step or text)):
            display.status(text)
            yield
    finally:
        display.close()


def _display(verb: str, unit: str | None) -> Display:
    if _quiet:
        return _Silent()
    if sys.stderr.isatty():
        from .bar import Bar

        return Bar(verb, unit)
    return _Lines(verb, unit)


class _Silent:
    """A display that shows nothing."""

    def __call__(self, done: int, total: int, name: str) -> None:
        """See Display."""

    def status(self, text: str) -> None:
        """See Display."""

    def close(self) -> None:
        """See Display."""


class _Lines:
    """Lines on stderr, one every few seconds."""

    def __init__(self, verb: str, unit: str | None) -> None:
        self._verb, self._unit = verb, unit
        self._start = self._last = time.monotonic()
        # The rate counts from the first call on: the time before went into start-up, or into compiling the kernels, and
        # what was done before was done by an earlier run.
        self._first_time, self._first_done = 0.0, -1
        self._done = self._total = -1
        self._timer: threading.Timer | None = None
        self._told: set[str] = set()

    def __call__(self, done: int, total: int, name: str) -> None:
        """See Display."""
        now = time.monotonic()
        if done < self._done or total != self._total:  # the first call, or the first of another count
            self._first_time, self._first_done = now, done
            self.close()
        self._done, self._total = done, total
        elapsed = now - self._first_time
        pause = QUIET_SECONDS if self._last == self._start else PLAIN_LINE_SECONDS
        if now - self._last < pause or not elapsed or done == self._first_done:
            return
        self._last = now
        rate = (done - self._first_done) / elapsed
        speed = f"{size(rate)}/s, " if self._unit == BYTES else ""
        left = f"{speed}{(total - done) / rate:.0f} s left"
        note(f"{self._verb} {done / total:.0%} of {amount(total, self._unit)}, {left}{f': {name}' if name else ''}")

    def status(self, text: str) -> None:
        """See Display; a step that ends soon is not shown."""
        self.close()
        if text and text not in self._told:
            self._timer = threading.Timer(STATUS_SECONDS, self._tell, [text])
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """See Display."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, text: str) -> None:
        if interrupts.came():  # it is not worth a line that the run waits for this step to end
            return
        self._told.add(text)
        note(f"{self._verb}: {text}" if self._verb else text)


def estimate(value: tuple[float, float | None] | None, form: str) -> str:
    """Return a measure with its standard error if it has one, as "1.23 +- 0.04"; an empty text for None."""
    if value is None:
        return ""
    measure, error = value
    return f"{measure:{form}}" + ("" if error is None else f" +- {error:{form.lstrip('+')}}")


def first_names(names: Sequence[str]) -> str:
    """Return the first three names, with "..." if there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
