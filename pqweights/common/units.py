"""Quantities as people write and read them: sizes, where 9GB is 9 * 10**9 bytes and 9GiB is 9 * 2**30, and counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from pqweights.errors import RecipeError

UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("k", "M", "G", "T"), start=1)
}
_BY_CASE = {name.upper(): value for name, value in UNITS.items()}


def parse_size(text: str | int) -> int:
    """Parse a size such as "5GB", "500 MiB" or "1000000" into bytes.

    Raises RecipeError for a text that is not a size.
    """
    if isinstance(text, int):
        return _checked(text, str(text))
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _BY_CASE:
        raise RecipeError(f"expected a size such as 5GB (10**9 bytes), 5GiB (2**30) or 500MB, found {text!r}")
    return _checked(int(Decimal(match[1]) * _BY_CASE[match[2].upper()]), text)


def _checked(size: int, text: str) -> int:
    if not 1 <= size < 2**63:
        raise RecipeError(f"expected at least one byte, at most 2**63, found {text[:40]!r}")
    return size


def size_text(count: float) -> str:
    """Return a number of bytes with its unit; GB is 10**9."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def first_names(names: Sequence[str]) -> str:
    """Return the first three names, with "..." if there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends in s: "1 tensor", "3 tensors"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
