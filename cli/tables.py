"""Tables of aligned text. On a terminal they fit its width; elsewhere they are as wide as their cells."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TextIO

from .printable import printable

GAP = "  "
# A narrower terminal is treated as one of this many columns.
LEAST_TERMINAL = 40
# Columns of text are made no narrower than this, or than their titles; the first column, which has names, than that.
LEAST_TEXT, LEAST_NAME = 16, 28

Columns = Sequence[tuple[str, bool]]  # the title of each column, and whether its cells are numbers
Rows = Sequence[Sequence[str]]


def terminal_width() -> int | None:
    """Return the number of columns of the terminal that stdout is; None if stdout is something else."""
    return _columns_of(sys.stdout)


def _columns_of(stream: TextIO) -> int | None:
    if not stream.isatty():
        return None
    fallback = os.get_terminal_size(stream.fileno())  # because shutil asks stdout alone
    return max(LEAST_TERMINAL, shutil.get_terminal_size(fallback).columns)


def table(columns: Columns, rows: Rows, *, drop: Sequence[str] = ()) -> list[str]:
    """Return lines of aligned text, in which unseen characters of cells are escaped.

    On a terminal that is too narrow, columns are left out if they may be (a line below
    names them), text is folded (in the last column) or
    shortened (in the others), and if that is not enough, the table is printed in parts that repeat the first column.

    columns: the title of each column, and whether its cells are numbers
    rows: the cells, in the order of the columns
    drop: titles of columns that may be left out, in this order
    """
    width = terminal_width()
    if width is None:
        return aligned(columns, rows)
    rows = _printable(rows)
    shown = list(range(len(columns)))
    for title in drop:
        if _total(_least(*_part(columns, rows, shown))) > width:
            shown = [number for number in shown if columns[number][0] != title]
    parts = _parts(columns, rows, shown, width)
    lines: list[str] = []
    for numbers in parts:
        lines += [*([""] if lines else []), *_fitted(*_part(columns, rows, numbers), width)]
    left_out = [title for number, (title, _) in enumerate(columns) if number not in shown]
    return [*lines, *([_left_out(left_out)] if left_out else [])]


def _left_out(titles: Sequence[str]) -> str:
    """Return how to see columns that there is no room for."""
    return f"not shown: {', '.join(titles)} (for these: a wider terminal, or | cat)"


def aligned(columns: Columns, rows: Rows, widths: Sequence[int] | None = None) -> list[str]:
    """Return lines of aligned text, whatever it is printed on.

    widths: the width of each column; None for that of its cells
    """
    rows = _printable(rows)
    widths = widths or _natural(columns, rows)

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, (_, numeric) in zip(cells, widths, columns, strict=True)
        ]
        return GAP.join(parts).rstrip()

    return [line([title for title, _ in columns]), *(line(row) for row in rows)]


def _printable(rows: Rows) -> Rows:
    return [[printable(cell) for cell in row] for row in rows]


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters.

    Names of tensors lose components from the left, but not the numbers of layers and experts, as in
    "...3.self_attn.q_proj.weight"; any other text loses its middle.
    """
    if len(text) <= width:
        return text
    components = text.split(".") if not any(character in text for character in " /") else [text]
    kept = [True] * len(components)
    for number, component in enumerate(components[:-2]):
        kept[number] = component.isdigit()
        text = _without(components, kept)
        if len(text) <= width:
            return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def folded(label: str, words: Sequence[str]) -> list[str]:
    """Return a label and words after it; on a terminal in lines that fit, with the words in columns."""
    width = terminal_width()
    if width is None:
        return [f"{label}{' '.join(words)}"]
    longest = max(len(word) for word in words)
    cells = [word.ljust(longest) for word in words]
    count = max(1, (width - len(label) + 1) // (longest + 1))
    count -= count % 10 if count > 10 else 0  # so that the numbers of layers are easy to count
    lines = [" ".join(cells[at : at + count]).rstrip() for at in range(0, len(cells), count)]
    return [f"{label}{lines[0]}", *(f"{' ' * len(label)}{line}" for line in lines[1:])]


def wrapped(line: str, stream: TextIO | None = None) -> str:
    """Return a line, folded between words into several where a terminal is too narrow for it.

    stream: where it is printed, stdout by default
    """
    width = terminal_width() if stream is None else _columns_of(stream)
    return line if width is None or len(line) <= width else _folded_line(line, width)


def _folded_line(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _without(components: Sequence[str], kept: Sequence[bool]) -> str:
    """Return a dotted name with "..." for each run of components that are not kept."""
    text = ""
    for component, is_kept in zip(components, kept, strict=True):
        if is_kept:
            text += f"{component}."
        elif not text.endswith("..."):
            text = f"{text.removesuffix('.')}..."
    return text.removesuffix(".")


def _natural(columns: Columns, rows: Rows) -> list[int]:
    """Return the width of each column in which nothing is shortened."""
    return [max([len(title), *(len(row[number]) for row in rows)]) for number, (title, _) in enumerate(columns)]


def _least(columns: Columns, rows: Rows) -> list[int]:
    """Return the least width of each column."""
    return [
        width if numeric else min(width, max(len(title), LEAST_TEXT if number else LEAST_NAME))
        for number, (width, (title, numeric)) in enumerate(zip(_natural(columns, rows), columns, strict=True))
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _part(columns: Columns, rows: Rows, numbers: Sequence[int]) -> tuple[Columns, Rows]:
    """Return a table with some of its columns."""
    return [columns[number] for number in numbers], [[row[number] for number in numbers] for row in rows]


def _parts(columns: Columns, rows: Rows, shown: Sequence[int], width: int) -> list[list[int]]:
    """Divide columns into parts that fit, each with the first column."""
    least = dict(zip(shown, _least(*_part(columns, rows, shown)), strict=True))
    first, *others = shown
    parts = [[first]]
    for number in others:
        if len(parts[-1]) > 1 and _total([least[each] for each in [*parts[-1], number]]) > width:
            parts.append([first])
        parts[-1].append(number)
    return parts


def _fitted(columns: Columns, rows: Rows, width: int) -> list[str]:
    """Return lines of aligned text that is at most `width` wide, if the least widths of the columns allow that."""
    widths, least = _natural(columns, rows), _least(columns, rows)
    while _total(widths) > width:
        excess = [(widths[number], number) for number in range(len(widths)) if widths[number] > least[number]]
        if not excess:
            break
        widths[max(excess)[1]] -= 1
    last = len(columns) - 1
    lines = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, widths[number], break_on_hyphens=False) or [""]
            if number == last and not columns[number][1]
            else [shortened(cell, widths[number])]
            for number, cell in enumerate(row)
        ]
        lines += list(zip_longest(*cells, fillvalue=""))
    return aligned(columns, lines, widths)
