"""What commands print: data on stdout, everything else on stderr, one line for an expected error.

Nothing else in this package writes to a terminal, so nothing from outside gets there unescaped (printable.py).

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
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from pqweights.common.units import size_text

from . import interrupts
from .printable import printable, printable_json, printable_prose
from .tables import table as table
from .tables import wrapped

if TYPE_CHECKING:
    from .bar import Bar

# What progress counts by default; other units are named in the plural as well.
BYTES = "bytes"
# Jobs, and steps without progress, that end within this many seconds show no line where stderr is not a terminal.
QUIET_SECONDS = STATUS_SECONDS = 2.0
# Seconds between two lines of progress.
PLAIN_LINE_SECONDS = 5.0

# How lines begin that warn of a result that may be wrong.
WARNING = "WARNING: "
# The flags of the command that is running, by the names of the library's parameters; main.py sets them.
flags: dict[str, str] = {}
# Whether the command that is running was asked to be quiet.
_quiet = False


def print_json(value: Any) -> None:
    """Write the one JSON document of a command to stdout."""
    from pqweights.common.strict_json import json_text

    print_json_pieces([f"{json_text(value)}\n"])


def print_json_pieces(pieces: Iterable[str]) -> None:
    """Write the one JSON document of a command, which comes in pieces, to stdout."""
    for piece in pieces:
        sys.stdout.write(printable_json(piece, _encoding(sys.stdout)))
    sys.stdout.flush()


def show(*lines: str) -> None:
    """Write what a command was asked to show to stdout, folded: each text is one line, whatever is in it."""
    for line in lines:
        _write_line(wrapped(printable(line)), sys.stdout)


def summary(*lines: str) -> None:
    """Write what a command did to stdout, folded, unless it is to be quiet."""
    if not _quiet:
        show(*lines)


def note(*lines: str) -> None:
    """Write lines for the user to stderr, unless the command is to be quiet."""
    for line in () if _quiet else lines:
        _write_line(printable(line), sys.stderr)


def warn(text: str) -> None:
    """Write a line about a result that may be wrong to stderr, also if the command is to be quiet."""
    _write_line(wrapped(printable(f"{WARNING}{with_flags(text)}"), sys.stderr), sys.stderr)


def write_text(text: str) -> None:
    """Write a text, or a piece of it, to stdout at once; it is escaped for a terminal, and a file gets it as it is."""
    text = printable_prose(text) if _is_terminal(sys.stdout) else text
    encoding = _encoding(sys.stdout)
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _write_line(text: str, stream: TextIO) -> None:
    encoding = _encoding(stream)
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _encoding(stream: TextIO) -> str:
    return stream.encoding or "utf-8"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


@contextlib.contextmanager
def errors(kept: Callable[[], bool | Path | None] | None = None, quiet: bool = False) -> Iterator[None]:
    """Turn expected errors into one line on stderr and exit code 1, or 2 for wrong options; a bug keeps its traceback.

    kept: whether an interrupted run left something from which the same command continues, or where; None if it never
        does
    quiet: whether to print only errors, warnings, and what the command was asked to show
    """
    global _quiet
    from pqweights.errors import OptionError, PqweightsError

    _quiet = quiet
    try:
        with interrupts.raised(), _warnings_of_ours():
            yield
    except OptionError as error:
        fail(str(error), code=2)
    except PqweightsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        _write_line(f"interrupted{_how_to_continue(kept)}", sys.stderr)
        raise typer.Exit(interrupts.EXIT_CODE) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    finally:
        _quiet = False


@contextlib.contextmanager
def _warnings_of_ours() -> Iterator[None]:
    """Write each warning of pqweights as a line on stderr."""
    from pqweights.errors import PqweightsWarning

    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, PqweightsWarning):
                warn(str(message))
            else:
                show(message, category, *where, **options)

        warnings.simplefilter("always", PqweightsWarning)
        warnings.showwarning = show_line
        yield


def with_flags(message: str) -> str:
    """Return a text of the library with flags in place of the names of parameters that stand between backquotes."""
    for name, flag in flags.items():
        message = message.replace(f"`{name}`", flag)
    return message


def _how_to_continue(kept: Callable[[], bool | Path | None] | None) -> str:
    again = None if kept is None else kept()
    if again is None:
        return ""
    if isinstance(again, Path):
        return printable(f"; finished work is kept in {again}; the same command continues it")
    return "; run the same command again to continue where it stopped" if again else "; no results were kept"


def fail(message: str, code: int = 1) -> NoReturn:
    """Write one line to stderr and exit."""
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Write an expected error to stderr, on one line."""
    _write_line(printable(f"error: {with_flags(' '.join(message.split()))}"), sys.stderr)


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
            complain(f"output: {failure.strerror or failure}")
        code = code or 1
    sys.exit(code)


@contextlib.contextmanager
def progress(verb: str, unit: str | None = BYTES) -> Iterator[Bar | _Lines]:
    """Yield a callback that shows progress, rate and time left: as a bar on a terminal, else as lines on stderr."""
    from pqweights.common.threads import listening

    display = _display(verb, unit)
    try:
        with listening(display.status):
            yield display
    finally:
        display.close()


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show what a slow step does while it lasts: on a terminal at once, else by a line if it takes longer than 2 s."""
    from pqweights.common.threads import listening

    display = _display("", None)
    try:
        with listening(lambda step: display.status(step or text)):
            display.status(text)
            yield
    finally:
        display.close()


def _display(verb: str, unit: str | None) -> Bar | _Lines:
    if sys.stderr.isatty() and not _quiet:
        from .bar import Bar

        return Bar(verb, unit)
    return _Lines(verb, unit)


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
        """Show how far the job is, and the name of what is done now."""
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
        speed = f"{size_text(rate)}/s, " if self._unit == BYTES else ""
        left = f"{speed}{(total - done) / rate:.0f} s left"
        amount = size_text(total) if self._unit == BYTES else f"{total:.0f} {self._unit or ''}".rstrip()
        note(f"{self._verb} {done / total:.0%} of {amount}, {left}{f': {name}' if name else ''}")

    def status(self, text: str) -> None:
        """Show a step that cannot say how far it is, if it lasts, until an empty text or the first call ends it."""
        self.close()
        if text and text not in self._told:
            self._timer = threading.Timer(STATUS_SECONDS, self._tell, [text])
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Show nothing from now on."""
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


def write_page(path: Path, page: str) -> None:
    """Write a page of HTML, whole or not at all, and say where it is."""
    from pqweights.checkpoint.writer import write_whole

    write_whole(path.absolute().parent, path.absolute(), [page.encode()])
    note(f"{path}: {len(page.encode())} bytes")
