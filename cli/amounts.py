"""Amounts in the units in which people read them."""

from __future__ import annotations

# What progress counts by default; other units are named in the plural as well.
BYTES = "bytes"


def size(count: float) -> str:
    """Return a number of bytes with its unit; GB is 10**9."""
    from pqweights.common.units import size_text

    return size_text(count)


def amount(count: float, unit: str | None) -> str:
    """Return a count with its unit; None for a count without one."""
    return size(count) if unit == BYTES else f"{count:.0f} {unit or ''}".rstrip()


def amount_of(done: float, total: float, unit: str | None) -> str:
    """Return a count and its total in the unit of the total, as "1.50/12.00 GB"."""
    whole, _, name = amount(total, unit).partition(" ")
    factor = 1.0
    if unit == BYTES:
        factor = 1000.0 ** ("B", "kB", "MB", "GB", "TB").index(name)
    decimals = 2 if factor > 1 else 0
    return f"{done / factor:.{decimals}f}/{whole} {name}".rstrip()


def duration(seconds: float) -> str:
    """Return a duration in the unit in which it is a small number."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
