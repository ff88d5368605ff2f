"""Tables of aligned text. On a terminal they fit its width; elsewhere they are as wide as their cells.

Not rich's tables: these cut numbers off where columns do not fit, and take 0.05 s to import.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TextIO

from .printable import printable

GAP = "  "
_NUMBERS = re.compile(r"\.\d+\.")  # of layers, within names
# A narrower terminal is treated as one of this many columns.
LEAST_TERMINAL = 40
# Columns of text are made no narrower than this, or than their titles; the first column, which has names, than that.
LEAST_TEXT, LEAST_NAME = 16, 28

# The titles of columns; those of columns of numbers begin with "#", which is not shown.
Titles = Sequence[str]
Rows = Sequence[Sequence[str]]


def terminal_width() -> int | None:
    """Return the number of columns of the terminal that stdout is; None if stdout is something else."""
    return _columns_of(sys.stdout)


def _columns_of(stream: TextIO) -> int | None:
    if not stream.isatty():
        return None
    fallback = os.get_terminal_size(stream.fileno())  # because shutil asks stdout alone
    return max(LEAST_TERMINAL, shutil.get_terminal_size(fallback).columns)


def table(titles: Titles, rows: Rows, drop: Sequence[str] = ()) -> list[str]:
    """Return lines of aligned text, in which unseen characters of cells are escaped.

    On a terminal that is too narrow, columns are left out if they may be (a line below names them), text is folded, and
    if that is not enough, the table is printed in parts that repeat the first column. Numbers stay whole.

    rows: the cells, in the order of the titles
    drop: titles of columns that may be left out, in this order
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    width = terminal_width()
    if width is None:
        return aligned(titles, rows)
    least = _least(titles, rows)
    shown, left_out = list(range(len(titles))), []
    for title in drop:
        if _total([least[number] for number in shown]) > width:
            shown.remove(titles.index(title))
            left_out.append(title)
    lines: list[str] = []
    for numbers in _parts(shown, least, width):
        part = [titles[number] for number in numbers], [[row[number] for number in numbers] for row in rows]
        lines += [*([""] if lines else []), *_folded_table(*part, width)]
    if left_out:
        lines.append(f"not shown: {', '.join(left_out).replace('#', '')} (for these: a wider terminal, or | cat)")
    return lines


def aligned(titles: Titles, rows: Rows, widths: Sequence[int] | None = None) -> list[str]:
    """Return lines of aligned text, whatever it is printed on.

    widths: the width of each column; None for that of its cells
    """
    widths = widths or _natural(titles, rows)

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if title.startswith("#") else cell.ljust(width)
            for cell, width, title in zip(cells, widths, titles, strict=True)
        ]
        return GAP.join(parts).rstrip()

    return [line([title.removeprefix("#") for title in titles]), *(line(row) for row in rows)]


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
    if width is None or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _natural(titles: Titles, rows: Rows) -> list[int]:
    """Return the width of each column in which nothing is folded."""
    return [
        max([len(title.removeprefix("#")), *(len(row[number]) for row in rows)]) for number, title in enumerate(titles)
    ]


def _least(titles: Titles, rows: Rows) -> list[int]:
    """Return the least width of each column."""
    return [
        width if title.startswith("#") else min(width, max(len(title), LEAST_TEXT if number else LEAST_NAME))
        for number, (width, title) in enumerate(zip(_natural(titles, rows), titles, strict=True))
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _parts(shown: Sequence[int], least: Sequence[int], width: int) -> list[list[int]]:
    """Divide the numbers of columns into parts that fit, each with the first column."""
    parts = [[0]]
    for number in shown[1:]:
        if len(parts[-1]) > 1 and _total([least[column] for column in [*parts[-1], number]]) > width:
            parts.append([0])
        parts[-1].append(number)
    return parts


def _folded_table(titles: Titles, rows: Rows, width: int) -> list[str]:
    """Return lines of aligned text that is at most `width` wide, if the least widths of the columns allow that."""
    widths, least = _natural(titles, rows), _least(titles, rows)
    for number in reversed(range(len(titles))):
        excess = max(0, _total(widths) - width)
        widths[number] -= min(excess, widths[number] - least[number])
    lines: list[Sequence[str]] = []
    for row in rows:
        cells = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)]
        lines += zip_longest(*cells, fillvalue="") if any(cells) else [row]
    return aligned(titles, lines, widths)


def by_layer(values: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of weight, with its values in the order of the layers. values: by name of weights"""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, value in sorted(values.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        kinds[_NUMBERS.sub(".*.", name)].append(value)
    width = max(len(kind) for kind in kinds)
    return [*chain.from_iterable(folded(f"  {kind:{width}}  ", several) for kind, several in kinds.items())]
