"""What commands print: data on stdout, everything else on stderr, one line for an expected error."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from .tables import table as table

# What progress counts by default; other units are named in the plural as well.
BYTES = "bytes"
# Jobs that end within this many seconds show no progress.
QUIET_SECONDS = 2.0
# Seconds between two lines of progress.
PLAIN_LINE_SECONDS = 5.0


def print_json(value: Any) -> None:
    """Write the one JSON document of a command to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line for the user to stderr."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def errors(continues: bool = False) -> Iterator[None]:
    """Turn expected errors into one line on stderr and exit code 1, or 2 for wrong options; a bug keeps its traceback.

    continues: whether the same command, run again after an interrupt, goes on where it stopped.
    """
    from pqweights.errors import OptionError, PqweightsError

    try:
        yield
    except OptionError as error:
        fail(str(error), code=2)
    except PqweightsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted" + ("; run the same command again: it continues where it stopped" if continues else ""))
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def fail(message: str, code: int = 1) -> None:
    """Write one line to stderr and exit."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def size(count: float) -> str:
    """Return a number of bytes with its unit; GB is 10**9."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def amount(count: float, unit: str | None) -> str:
    """Return a count with its unit; None for a count without one."""
    return size(count) if unit == BYTES else f"{count:.0f} {unit or ''}".rstrip()


@contextlib.contextmanager
def progress(verb: str, unit: str | None = BYTES) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback that shows progress, rate and time left: as a bar on a terminal, else as lines on stderr."""
    if sys.stderr.isatty():
        with _bar(verb, unit) as callback:
            yield callback
    else:
        yield _lines(verb, unit)


@contextlib.contextmanager
def _bar(verb: str, unit: str | None) -> Iterator[Callable[[int, int, str], None]]:
    from rich import progress as rich
    from rich.console import Console

    how_far: tuple[rich.ProgressColumn, ...] = (rich.DownloadColumn(), rich.TransferSpeedColumn())
    if unit != BYTES:
        how_far = (rich.MofNCompleteColumn(), *([rich.TextColumn(unit)] if unit else []))
    name_column = rich.TextColumn("{task.fields[name]}", markup=False, style="dim")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        *how_far,
        rich.TimeRemainingColumn(),
        name_column,
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None, name="")

        def callback(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, name=name[-48:])

        yield callback


def _lines(verb: str, unit: str | None) -> Callable[[int, int, str], None]:
    start = last = time.monotonic()
    # The rate counts from the first call on: the time before went into start-up, or into compiling the kernels.
    first_time, first_done = 0.0, -1

    def callback(done: int, total: int, name: str) -> None:
        nonlocal last, first_time, first_done
        now = time.monotonic()
        if first_done < 0:
            first_time, first_done = now, done
        elapsed = now - first_time
        pause = QUIET_SECONDS if last == start else PLAIN_LINE_SECONDS
        if now - last < pause or not elapsed or done == first_done:
            return
        last = now
        rate = (done - first_done) / elapsed
        speed = f"{size(rate)}/s, " if unit == BYTES else ""
        note(f"{verb} {done / total:.0%} of {amount(total, unit)}, {speed}{(total - done) / rate:.0f} s left: {name}")

    return callback


def estimate(value: tuple[float, float | None] | None, form: str) -> str:
    """Return a measure with its standard error if it has one, as "1.23 +- 0.04"; an empty text for None."""
    if value is None:
        return ""
    measure, error = value
    return f"{measure:{form}}" + ("" if error is None else f" +- {error:{form.lstrip('+')}}")


def first_names(names: Sequence[str]) -> str:
    """Return the first three names, with "..." if there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
