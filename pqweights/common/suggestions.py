"""What a message suggests in place of an unknown name: the nearest known one, if one is near at all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The least share of common characters (difflib's ratio) of two names that are near. Below it, two names of equal length
# share fewer than three in five characters.
LEAST_RATIO = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to another one, upper and lower case alike; None if none is near."""
    by_lower: dict[str, str] = {}
    for candidate in known:
        by_lower.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=LEAST_RATIO)
    return by_lower[near[0]] if near else None


def instead(name: str, known: Iterable[str]) -> str:
    """Return what was expected in place of a name: "the nearest is 'bits'; expected name, bits, rules"."""
    names = list(known)
    near = nearest(name, names)
    expected = f"expected {', '.join(names)}"
    return expected if near is None else f"the nearest is {near!r}; {expected}"
