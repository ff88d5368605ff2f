"""What commands print: data on stdout, everything else on stderr, one line for an expected error."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer

# What progress counts, if not some other unit, named in the plural.
BYTES = "bytes"
# Progress of jobs that end before this many seconds is not shown.
QUIET_SECONDS = 2.0
PLAIN_LINE_SECONDS = 5.0


def print_json(value: Any) -> None:
    """The one JSON document of a command, on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for the user that is no data."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def errors(continues: bool = False) -> Iterator[None]:
    """Turn expected errors into one line on stderr and exit code 1, or 2 for wrong options; a bug keeps its traceback.

    continues: whether a command that was interrupted goes on where it stopped when it is given again.
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
    """Print one line and exit."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def size(count: float) -> str:
    """Bytes for people; GB is 10**9."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def amount(count: float, unit: str | None) -> str:
    """So much of a unit, for people; None: of what needs no name."""
    return size(count) if unit == BYTES else f"{count:.0f} {unit or ''}".rstrip()


@contextlib.contextmanager
def progress(verb: str, unit: str | None = BYTES) -> Iterator[Callable[[int, int, str], None]]:
    """A callback that shows what, how far, how much per second and time left: a bar on a terminal, lines elsewhere."""
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
    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), *how_far, rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[name]}", markup=False, style="dim"),
    )  # fmt: skip
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None, name="")

        def callback(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, name=name[-48:])

        yield callback


def _lines(verb: str, unit: str | None) -> Callable[[int, int, str], None]:
    start = last = time.monotonic()
    # The rate counts from the first bytes on: what came before was start-up, or the one-time compilation of the kernels.
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


def table(columns: list[tuple[str, bool]], rows: list[list[str]]) -> str:
    """Plain aligned text; each column is (title, whether its cells are numbers)."""
    widths = [max([len(title), *(len(row[i]) for row in rows)]) for i, (title, _) in enumerate(columns)]

    def line(cells: list[str]) -> str:
        parts = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, (_, numeric) in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line([title for title, _ in columns]), *(line(row) for row in rows)])


def estimate(value: tuple[float, float | None] | None, form: str) -> str:
    """A measure with its standard error, where it has one: "1.23 +- 0.04"; empty for None."""
    if value is None:
        return ""
    measure, error = value
    return f"{measure:{form}}" + ("" if error is None else f" +- {error:{form.lstrip('+')}}")
