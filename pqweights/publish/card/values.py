"""Values of a manifest as text and numbers, where the manifest promises no type for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pqweights.rewrite.manifest import Manifest

Item = TypeVar("Item")


def as_number(value: Any) -> float | None:
    """Return a value if it is a number of a sensible size, else None."""
    return float(value) if isinstance(value, float | int) and value is not True and abs(value) < 1e300 else None


def as_text(value: Any) -> str:
    """Return a value if it is a string, an empty string for None, and its JSON for anything else."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return the items in groups, by a key."""
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def main_bits(manifest: Manifest) -> float | None:
    """Return the bit width that most of the quantized weights have, or None if none is quantized."""
    counts: dict[float, int] = defaultdict(int)
    for tensor in manifest.tensors:
        if tensor.bits is not None:
            counts[tensor.bits] += tensor.weights
    return max(counts, key=lambda bits: (counts[bits], bits)) if counts else None
