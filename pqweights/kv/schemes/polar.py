"""PolarQuant of Han et al. (arXiv:2502.02617): rotated keys and values as angles, at 3.875 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pqweights.codecs.polar_codebook import GROUP
from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.recursive import RecursivePolar
from pqweights.kv.schemes.scheme import WINDOWS, LayerModel, Scheme


@dataclass(frozen=True, kw_only=True)
class Polar(Scheme):
    """Angles of 4, 2, 2 and 2 bits and a radius of 16 bits for 16 coordinates.

    online: 1 for codebooks made for each prompt
    rotation: 0 to leave out the random rotation
    """

    online: int = 0
    rotation: int = 1

    name = "polar"
    choices = {"online": (0, 1), "rotation": (0, 1), "residual": WINDOWS}
    words = {"online": {"online": 1}}
    size_unit: ClassVar[int] = GROUP

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return RecursivePolar(layer.key_size, online=bool(self.online), rotated=bool(self.rotation))

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return RecursivePolar(layer.value_size, online=bool(self.online), rotated=bool(self.rotation))
