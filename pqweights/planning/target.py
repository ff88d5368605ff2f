"""Targets: how large a result may be, in bytes or in bits per weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pqweights.common.units import parse_size
from pqweights.errors import RecipeError

# How recipe files and options spell the two kinds of targets.
KEYS = ("target_size", "target_bpw")
OPTIONS = ("`target_size`", "`target_bpw`")


@dataclass(frozen=True)
class SizeTarget:
    """An upper bound for the result, one of the two.

    output_bytes: size of its safetensors files, with headers and the tensors that are kept
    bits_per_weight: mean over the weights that the recipe would quantize
    """

    output_bytes: int | None = None
    bits_per_weight: float | None = None

    def __str__(self) -> str:
        if self.output_bytes is not None:
            return f"{self.output_bytes} bytes"
        return f"{self.bits_per_weight:g} bits per weight"

    def to_json(self) -> dict[str, Any]:
        """Return the target with its key in a recipe."""
        if self.output_bytes is not None:
            return {"target_size": self.output_bytes}
        return {"target_bpw": self.bits_per_weight}


def make_target(size: str | int | None, bits_per_weight: float | None, *, file: str | None = None) -> SizeTarget | None:
    """Return the target for a size, as text or in bytes, or for bits per weight; None without either.

    file: the recipe file that gives the target, whose keys messages name; None for options

    Raises RecipeError for both at once and for a value that is not a size.
    """
    where = "" if file is None else f"{file}: "
    size_key, bits_key = KEYS if file is not None else OPTIONS
    if size is not None and bits_per_weight is not None:
        raise RecipeError(f"{where}give either {size_key} or {bits_key}, not both")
    if bits_per_weight is not None:
        return SizeTarget(bits_per_weight=_checked_bits(f"{where}{bits_key}", bits_per_weight))
    if size is None:
        return None
    try:
        return SizeTarget(output_bytes=parse_size(size))
    except RecipeError as error:
        raise RecipeError(f"{where}{size_key}: {error}") from None


def _checked_bits(where: str, bits_per_weight: float) -> float:
    try:
        value = float(bits_per_weight)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not 0 < value < math.inf:
        raise RecipeError(f"{where}: expected a positive number of bits per weight, found {value}")
    return value
