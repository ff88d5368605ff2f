"""Markdown of what strangers wrote: names and reasons that can break neither a table, nor a code span, nor a comment.

A manifest may be anybody's. Whatever is not surely harmless is written as numeric character references, which Markdown and
HTML show and never interpret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_LENGTH = 200
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/+=@-]+(?: [A-Za-z0-9_.,:/+=@-]+)*")
_HARMLESS = re.compile(r"[\w ,.;:/()%'-]")
# Outside of words they may mean emphasis; \w has them.
_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def words(text: object) -> str:
    """For a line of prose or a cell."""
    clipped = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)[:MAX_LENGTH])
    clipped += "..." if len(str(text)) > MAX_LENGTH else ""
    escaped = "".join(char if _HARMLESS.fullmatch(char) else f"&#{ord(char)};" for char in clipped)
    return _UNDERSCORE.sub("&#95;", escaped)


def code(text: object) -> str:
    """A name, in the type of code."""
    shown = str(text)
    if _PLAIN.fullmatch(shown) and len(shown) <= MAX_LENGTH:
        return f"`{shown}`"
    return f"<code>{words(shown)}</code>" if shown else "``"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of some names."""
    return ", ".join(code(name) for name in names[:most]) + (", ..." if len(names) > most else "")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are Markdown already. numbers: the columns that are set to the right."""
    rule = ["---:" if place in numbers else "---" for place in range(len(titles))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, rule, *rows))


def fenced(language: str, lines: Sequence[str]) -> str:
    """A block of code, of one-line strings."""
    return "\n".join([f"```{language}", *lines, "```"])


def size(count: int) -> str:
    """Bytes; GB is 10**9."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def number(value: float | None) -> str:
    """A measure, with four significant digits."""
    return "-" if value is None else f"{value:.4g}"
