"""Rotated keys and values in Lloyd-Max levels: the scalar case of TurboQuant (arXiv:2504.19874)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.scalar import RotatedScalar
from pqweights.kv.schemes.scheme import WINDOWS, LayerModel, Scheme, digits

BITS = range(2, 9)


@dataclass(frozen=True, kw_only=True)
class Hadamard(Scheme):
    """A number of bits for each coordinate, and 16 for each vector.

    bits: of keys and of values
    keys, values: of one of them; 0 for `bits`
    centred: 0 to leave the mean of the first keys in them
    """

    bits: int = 4
    keys: int = 0
    values: int = 0
    centred: int = 1

    has_kernels: ClassVar[bool] = True
    name = "hadamard"
    choices = {"bits": BITS, "keys": BITS, "values": BITS, "centred": (0, 1), "residual": WINDOWS}
    words = digits("bits", BITS)

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return RotatedScalar(layer.key_size, self.keys or self.bits, centred=bool(self.centred))

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return RotatedScalar(layer.value_size, self.values or self.bits)
