"""The methods of quantizing a cache, each with its options: `hadamard:3`, `polar-rope:m4n2,values=2,residual=64`."""

from __future__ import annotations

from pqweights.kv.schemes.hadamard import Hadamard
from pqweights.kv.schemes.klt import Klt
from pqweights.kv.schemes.polar import Polar
from pqweights.kv.schemes.polar_rope import PolarRope
from pqweights.kv.schemes.scheme import LayerModel, Scheme
from pqweights.kv.schemes.unquantized import Unquantized

__all__ = ["SCHEMES", "LayerModel", "Scheme"]

SCHEMES: dict[str, type[Scheme]] = {
    "klt": Klt,
    "hadamard": Hadamard,
    "polar-rope": PolarRope,
    "polar": Polar,
    "none": Unquantized,
}
