"""PolarQuant of Wu et al. (arXiv:2502.00527): pairs of key coordinates as angle and radius, values token by token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from pqweights.kv.pairs import PolarPairs
from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.schemes.scheme import UNQUANTIZED, WINDOWS, LayerModel, Scheme
from pqweights.kv.uniform import TokenWise

WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, kw_only=True)
class PolarRope(Scheme):
    """Angles of m and radii of n bits.

    angle, radius: m and n
    values: the bits of values, 2 or 4; 16 to keep them as they are
    """

    angle: int = 4
    radius: int = 4
    values: int = 4
    residual: int = 128

    has_kernels: ClassVar[bool] = True
    name = "polar-rope"
    choices = {"angle": WIDTHS, "radius": WIDTHS, "values": (2, 4, UNQUANTIZED), "residual": WINDOWS}
    words = {f"m{m}n{n}": {"angle": m, "radius": n} for m in WIDTHS for n in WIDTHS}
    always: ClassVar[Collection[str]] = ("angle", "radius")
    needs_rope: ClassVar[bool] = True

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        assert layer.pairs is not None
        return PolarPairs(layer.pairs, self.angle, self.radius)

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer | None:
        """See Scheme."""
        return None if self.values == UNQUANTIZED else TokenWise(self.values)
