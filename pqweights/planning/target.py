"""Targets: how large a result may be, in bytes or in bits per weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pqweights.common.units import BPW_OF, parse_size
from pqweights.errors import RecipeError

# What bits per weight are a mean over: the weights that the recipe quantizes, or all parameters of the checkpoint, with
# every byte of the safetensors files.
QUANTIZED, CHECKPOINT = BPW_OF
# How recipe files and options spell the three values that make a target.
KEYS = ("target_size", "target_bpw", "bpw_of")
OPTIONS = ("`target_size`", "`target_bpw`", "`bpw_of`")


@dataclass(frozen=True)
class SizeTarget:
    """An upper bound for the result: bytes in its safetensors files, or bits per weight, one of the two.

    output_bytes: the bytes
    bits_per_weight: the bits per weight
    bpw_of: what the bits per weight are a mean over: QUANTIZED or CHECKPOINT
    """

    output_bytes: int | None = None
    bits_per_weight: float | None = None
    bpw_of: str = QUANTIZED

    def __str__(self) -> str:
        if self.output_bytes is not None:
            return f"{self.output_bytes} bytes"
        what = "parameter of the checkpoint" if self.bpw_of == CHECKPOINT else "weight"
        return f"{self.bits_per_weight:g} bits per {what}"

    @property
    def bounds_files(self) -> bool:
        """Whether the size of the safetensors files counts, with their headers and the tensors that are kept."""
        return self.output_bytes is not None or self.bpw_of == CHECKPOINT

    def file_bytes(self, weights: int) -> int:
        """Return the bytes that the safetensors files may have. weights: the parameters of the whole checkpoint."""
        if self.output_bytes is not None:
            return self.output_bytes
        assert self.bits_per_weight is not None and self.bpw_of == CHECKPOINT
        return math.floor(min(self.bits_per_weight * weights / 8, 2.0**62))

    def to_json(self) -> dict[str, Any]:
        """Return the target with its keys in a recipe."""
        if self.output_bytes is not None:
            return {"target_size": self.output_bytes}
        return {"target_bpw": self.bits_per_weight} | ({} if self.bpw_of == QUANTIZED else {"bpw_of": self.bpw_of})


def make_target(
    size: str | int | None, bits_per_weight: float | None, *, bpw_of: str | None = None, file: str | None = None
) -> SizeTarget | None:
    """Return the target for a size, as text or in bytes, or for bits per weight; None without either.

    bpw_of: what the bits per weight are a mean over; None for QUANTIZED
    file: the recipe file that gives the target, whose keys messages name; None for options

    Raises RecipeError for both at once, for a value that is not a size, and for an unknown bpw_of or one without bits
    per weight.
    """
    where = "" if file is None else f"{file}: "
    size_key, bits_key, of_key = KEYS if file is not None else OPTIONS
    if bpw_of is not None and bpw_of not in BPW_OF:
        raise RecipeError(f"{where}{of_key}: expected {' or '.join(BPW_OF)}, found {bpw_of!r}")
    if size is not None and bits_per_weight is not None:
        raise RecipeError(f"{where}give either {size_key} or {bits_key}, not both")
    if bits_per_weight is not None:
        return SizeTarget(
            bits_per_weight=_checked_bits(f"{where}{bits_key}", bits_per_weight), bpw_of=bpw_of or QUANTIZED
        )
    if bpw_of is not None:
        raise RecipeError(f"{where}{of_key} needs {bits_key}")
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
