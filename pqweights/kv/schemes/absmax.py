"""Per-token absmax: the simplest baseline."""

from __future__ import annotations

from dataclasses import dataclass

from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.schemes.scheme import WINDOWS, LayerModel, Scheme, digits
from pqweights.kv.uniform import Symmetric

BITS = range(2, 9)


@dataclass(frozen=True, kw_only=True)
class Absmax(Scheme):
    """Each key and each value apart, in even steps around zero.

    bits: of a code
    """

    bits: int = 4

    name = "absmax"
    choices = {"bits": BITS, "residual": WINDOWS}
    words = digits("bits", BITS)

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return Symmetric(self.bits)

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return Symmetric(self.bits)
