"""Ours: transform coding in bases that follow from the weights, after Karhunen and Loeve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pqweights.kv.klt import KarhunenLoeve
from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.schemes.scheme import WINDOWS, LayerModel, Scheme, digits

BITS = tuple(quarters / 4 for quarters in range(4, 25))


@dataclass(frozen=True, kw_only=True)
class Klt(Scheme):
    """A mean number of bits for each coordinate, and 16 for each vector.

    bits: of keys and of values
    keys, values: of one of them; 0 for `bits`
    """

    bits: float = 3
    keys: float = 0
    values: float = 0

    name = "klt"
    choices = {"bits": BITS, "keys": BITS, "values": BITS, "residual": WINDOWS}
    words = digits("bits", BITS)
    needs_weights: ClassVar[bool] = True
    mixes_sequences: ClassVar[bool] = True  # kernels want the same widths for all

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        assert layer.bases is not None
        return KarhunenLoeve(layer.bases.keys, self.keys or self.bits, layer.bases.turning)

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        assert layer.bases is not None
        return KarhunenLoeve(layer.bases.values, self.values or self.bits, None)
