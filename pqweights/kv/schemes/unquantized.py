"""No quantization, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.schemes.scheme import LayerModel, Scheme


@dataclass(frozen=True, kw_only=True)
class Unquantized(Scheme):
    """Keys and values as they come."""

    name = "none"
    choices = {}
    words = {}
    size_unit: ClassVar[int] = 1

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer | None:
        """See Scheme."""
        return None

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer | None:
        """See Scheme."""
        return None
