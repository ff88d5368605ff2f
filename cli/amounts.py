"""Amounts in the units in which people read them."""

from __future__ import annotations

# What progress counts by default; other units are named in the plural as well.
BYTES = "bytes"


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
