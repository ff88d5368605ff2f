"""Markdown with untrusted text: names and reasons that cannot break a table, a code span or a comment.

A manifest may come from anywhere. Characters that are not known to be harmless are written as numeric character
references, which Markdown and HTML show but never interpret.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

MAX_LENGTH = 200
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/+=@-]+(?: [A-Za-z0-9_.,:/+=@-]+)*")
_HARMLESS = re.compile(r"[\w ,.;:/()%'-]")
# At the edge of a word an underscore may mean emphasis. (\w includes underscores.)
_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def words(text: object) -> str:
    """Escape a text for a line of prose or a cell of a table, and shorten it to MAX_LENGTH."""
    clipped = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)[:MAX_LENGTH])
    clipped += "..." if len(str(text)) > MAX_LENGTH else ""
    escaped = "".join(char if _HARMLESS.fullmatch(char) else f"&#{ord(char)};" for char in clipped)
    return _UNDERSCORE.sub("&#95;", escaped)


def html_text(text: object) -> str:
    """Escape a text for an element or an attribute of HTML or SVG; characters that do not show are replaced."""
    return html.escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)))


def code(text: object) -> str:
    """Return a name as code."""
    shown = str(text)
    if _PLAIN.fullmatch(shown) and len(shown) <= MAX_LENGTH:
        return f"`{shown}`"
    return f"<code>{words(shown)}</code>" if shown else "``"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as code, separated by commas, with "..." if there are more."""
    return ", ".join(code(name) for name in names[:most]) + (", ..." if len(names) > most else "")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of cells that are already Markdown. numbers: the columns that are aligned to the right."""
    rule = ["---:" if place in numbers else "---" for place in range(len(titles))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, rule, *rows))


def fenced(language: str, lines: Sequence[str]) -> str:
    """Return a block of code with these lines."""
    return "\n".join([f"```{language}", *lines, "```"])


def number(value: float | None) -> str:
    """Return a measure with four significant digits; "-" for None."""
    return "-" if value is None else f"{value:.4g}"
